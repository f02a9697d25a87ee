//! `displaySecret` in the context: which Secret holds the display's password, and whether the operator makes one.

use std::sync::Arc;

use kube::ResourceExt;
use serde::Serialize;
use serde_json::json;

use crate::{
    api::VirtualMachine,
    observed::{Object, Observed},
    ownership::origin::Origin,
};

#[derive(Serialize)]
pub(super) struct DisplaySecret {
    pub(super) name: Option<String>,
    version: Option<String>,
    pub(super) generate: bool,
    password: String,
}

/// The display secrets of a VM in the cluster.
struct Existing<'a> {
    /// The name of the Secret that the operator generates.
    generated: String,
    /// Secrets of the operator that are as it made them.
    as_made: Vec<&'a Arc<Object>>,
    /// Secrets of the operator in which somebody set a password.
    set: Vec<&'a Arc<Object>>,
    /// Secrets of people.
    theirs: Vec<&'a Arc<Object>>,
}

impl<'a> Existing<'a> {
    fn of(vm: &VirtualMachine, observed: &'a Observed) -> Self {
        let (ours, theirs): (Vec<_>, Vec<_>) = observed.display_secrets().partition(|secret| is_ours(vm, secret));
        let made = json!({ "data": { "display-password": "", "password-expiry": "" } });
        let (as_made, set) = ours.into_iter().partition(|secret| secret.owns_all_of(&made));
        Self { generated: format!("{}-display-secret", vm.name_any()), as_made, set, theirs }
    }

    /// Whether the operator must render its own Secret. An object that is not rendered is deleted.
    fn generate(&self, vm: &VirtualMachine, observed: &Observed) -> bool {
        let is_generated = |secret: &&Arc<Object>| secret.key.name == self.generated;
        // Somebody set a password in it, which must not be lost, even if the spec does not want a Secret any more.
        let is_set = self.set.iter().any(is_generated);
        // A Pod mounts it: if the kubelet restarts the runner in that Pod, the runner must find its password. If a person made a Secret
        // with that name, the Pod mounts the person's.
        let mut pods = observed.objects.iter().filter(|object| object.key.is_pod() && object.deleting.is_none());
        let is_mounted = !self.theirs.iter().any(is_generated) && pods.any(|pod| mounts(pod, &self.generated));
        is_set || is_mounted || (self.theirs.is_empty() && vm.spec.vm.display.spice.generate_secret)
    }

    /// The Secret to use and the version of its content: a person's before the generated one, and the first by name of several, so that
    /// an event of the watch does not change the choice.
    fn chosen(self, vm: &VirtualMachine, generate: bool) -> Option<(&'a Arc<Object>, Option<String>)> {
        // Without a version, because otherwise the first start of each VM would end with a change of its Pod.
        let as_made = self.as_made.into_iter().filter(|_| generate).map(|secret| (secret, None));
        let by_people = self.theirs.into_iter().chain(self.set);
        let by_people = by_people.map(|secret| (secret, Some(secret.version.to_string())));
        let generated = self.generated;
        as_made
            .chain(by_people)
            .min_by_key(|(secret, _)| (secret.key.name == generated, is_ours(vm, secret), secret.key.name.as_str()))
    }
}

impl DisplaySecret {
    pub(super) fn of(vm: &VirtualMachine, observed: &Observed, new_password: &str) -> Self {
        let existing = Existing::of(vm, observed);
        let generate = existing.generate(vm, observed);
        let generated = generate.then(|| existing.generated.clone());
        let (secret, version) = existing.chosen(vm, generate).unzip();
        Self {
            name: secret.map(|secret| secret.key.name.clone()).or(generated),
            version: version.flatten(),
            generate,
            password: new_password.to_owned(),
        }
    }
}

/// Whether the operator made the Secret. Its labels do not say that: people copy them, too.
fn is_ours(vm: &VirtualMachine, secret: &Object) -> bool {
    match secret.origin {
        Origin::Manager => secret.is_of(vm),
        Origin::Unrecorded => secret.is_owned_by(&vm.uid().unwrap_or_default()),
        Origin::Predecessor | Origin::Other => false,
    }
}

fn mounts(pod: &Object, secret: &str) -> bool {
    let volumes = pod.spec["volumes"].as_array().into_iter().flatten();
    let mut sources = volumes.flat_map(|volume| volume["projected"]["sources"].as_array()).flatten();
    sources.any(|source| source["secret"]["name"] == secret)
}
