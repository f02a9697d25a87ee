//! What a person should know of a VM of the VM-Operator in Java before this project's manager takes over its namespace.
//!
//! What the manager does to the objects is its plan ([`plan::effect`](crate::plan::effect)); here is what no plan shows: what waits in
//! the spec, in Secrets and in claims for the day on which the VM gets our runner.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;

use crate::{
    allowed::{List, NotAllowed, Rule, extended, lines},
    api::{Image, VirtualMachine},
    claims,
    config::Allowed,
    object::Rendered,
    observed::Observed,
    render::context::{IMAGE_REPOSITORY_CLAIM, LEGACY_SERVICE_ACCOUNT},
};

/// Something to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// Whether a person has to do something, now or before the VM gets our runner.
    pub needs_attention: bool,
    /// What it is.
    pub text: String,
}

/// What is known of the namespace. `None`: it could not be read.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The display Secrets without a password.
    pub open_displays: Option<BTreeSet<String>>,
    /// Whether the claim with CD images exists.
    pub has_image_repository: Option<bool>,
    /// The names of the pools.
    pub pools: Option<BTreeSet<String>>,
}

/// What there is to know of a VM. `rendered` are its objects as our manager would have them; `violations` the rules of our definition
/// that its spec breaks.
pub fn findings(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &[Rendered],
    violations: &[String],
    around: &Surroundings,
) -> Vec<Finding> {
    let mut found = Findings { vm, observed, rendered, found: Vec::new() };
    for violation in violations {
        found.attention(format!(
            "our definition refuses a part of the spec, so correct it with the next change: {violation}"
        ));
    }
    found.runner();
    found.claims(around);
    found.display(around);
    found.rest(around);
    found.found
}

/// What an administrator must allow, so that the VMs of a namespace go on: lines of the configuration, and which VM needs which. `None`: nothing.
pub fn permissions(allowed: &Allowed, needed: &[(String, Vec<NotAllowed>)]) -> Option<Finding> {
    let mut vms: BTreeMap<(List, &str), Vec<&str>> = BTreeMap::new();
    let mut after = allowed.clone();
    for (vm, refusals) in needed {
        after = extended(&after, refusals);
        for refusal in refusals {
            if let Rule::List(list) = refusal.rule {
                let names = vms.entry((list, &refusal.value)).or_default();
                if names.last() != Some(&vm.as_str()) {
                    names.push(vm);
                }
            }
        }
    }
    if vms.is_empty() {
        return None;
    }
    let mut text = String::from(
        "the configuration does not allow all that the VMs have. Without these lines at the end of config.yaml they go on, and are not started \
         again; allow no more than you want:\n",
    );
    text += &lines(allowed, &after);
    for ((list, value), names) in vms {
        text += &format!("# {list} {value}: {}\n", names.join(", "));
    }
    Some(Finding { needs_attention: true, text: text.trim_end().to_owned() })
}

struct Findings<'a> {
    vm: &'a VirtualMachine,
    observed: &'a Observed,
    rendered: &'a [Rendered],
    found: Vec<Finding>,
}

impl Findings<'_> {
    fn attention(&mut self, text: String) {
        self.found.push(Finding { needs_attention: true, text });
    }

    fn note(&mut self, text: String) {
        self.found.push(Finding { needs_attention: false, text });
    }

    fn runner(&mut self) {
        let spec = &self.vm.spec;
        let pod = self.rendered.iter().find(|object| object.key.is_pod());
        let is_legacy = pod.is_some_and(|pod| pod.value["spec"]["serviceAccountName"] == LEGACY_SERVICE_ACCOUNT);
        let image = spec.image.as_ref().and_then(Image::reference);
        match (image, is_legacy) {
            (Some(image), true) => {
                self.note(format!("it goes on with the runner of the VM-Operator, {image}; without spec.image it gets ours at its next start"));
            }
            (Some(image), false) => self.attention(format!(
                "the image {image} is no runner of the VM-Operator that the configuration lists: if it is a copy of one, list it as \
                 legacyRunnerImages, and not as runnerImages, before the manager starts"
            )),
            (None, _) => self.note("it gets our runner at its next start: see \"The guest with our image\" in docs/takeover.md".into()),
        }
        if let Some(source) = &spec.runner_template.source {
            self.attention(format!(
                "spec.runnerTemplate.source {source} is a FreeMarker template in the image: before the VM gets our runner, it needs one for that"
            ));
        }
        let sets = self.observed.objects.iter().filter(|object| object.key.kind == "StatefulSet");
        for set in sets.map(|set| set.key.name.clone()).collect::<Vec<_>>() {
            self.note(format!("StatefulSet {set} makes its Pod: it is deleted without the Pod, at the latest before the VM's next stop or restart"));
        }
    }

    fn claims(&mut self, around: &Surroundings) {
        let name = self.vm.name_any();
        let has_pod = self.observed.objects.iter().any(|object| object.key.is_pod());
        let (mut former, mut new) = (Vec::new(), Vec::new());
        let disks: Vec<String> = claims::volumes(self.vm).flatten().collect();
        let first_names: BTreeSet<String> = disks
            .iter()
            .filter_map(|volume| claims::disk_names(&name, volume).into_iter().next())
            .chain([claims::runner_data_name(&nameless(self.vm), &Observed::nothing(Timestamp::UNIX_EPOCH))])
            .collect();
        for claim in self.rendered.iter().filter(|object| object.key.is_claim()) {
            let claim = &claim.key.name;
            if self.observed.claim(claim).is_none() {
                new.push(claim.clone());
            } else if !first_names.contains(claim) {
                former.push(claim.clone());
            }
        }
        if !former.is_empty() {
            self.note(format!("claims keep their former names: {}", former.join(", ")));
        }
        if !new.is_empty() && has_pod {
            self.attention(format!(
                "claims that do not exist, although it runs, are created empty: {}",
                new.join(", ")
            ));
        } else if !new.is_empty() {
            self.note(format!("claims are created, because it never had them: {}", new.join(", ")));
        }
        let mounts_repository = self.rendered.iter().filter(|object| object.key.is_pod()).any(|pod| {
            let volumes = pod.value["spec"]["volumes"].as_array().into_iter().flatten();
            let mut claims = volumes.filter_map(|volume| volume["persistentVolumeClaim"]["claimName"].as_str());
            claims.any(|claim| claim == IMAGE_REPOSITORY_CLAIM)
        });
        if mounts_repository && around.has_image_repository == Some(false) {
            self.attention(format!("its Pod mounts the claim {IMAGE_REPOSITORY_CLAIM}, which does not exist"));
        }
    }

    fn display(&mut self, around: &Surroundings) {
        let secrets: Vec<String> = self.observed.display_secrets().map(|secret| secret.key.name.clone()).collect();
        for secret in secrets {
            if around.open_displays.as_ref().is_some_and(|open| open.contains(&secret)) {
                self.attention(format!(
                    "the display Secret {secret} has no password: with our runner the VM does not start"
                ));
            }
        }
    }

    fn rest(&mut self, around: &Surroundings) {
        let spec = &self.vm.spec;
        if let Some(pools) = &around.pools {
            let missing: Vec<&str> =
                spec.pools.iter().filter(|pool| !pools.contains(*pool)).map(String::as_str).collect();
            if !missing.is_empty() {
                self.attention(format!("it belongs to pools that do not exist: {}", missing.join(", ")));
            }
        }
        if spec.cloud_init.as_ref().is_some_and(|data| !data.meta_data.contains_key("instance-id")) {
            self.note("cloud-init runs once more when it starts with our runner: its instance-id changes".into());
        }
        if spec.vm.networks.is_empty() {
            self.note("it has no network; the VM-Operator's runner gave it QEMU's default one, ours does not".into());
        }
    }
}

/// The VM without what is known of its claims.
fn nameless(vm: &VirtualMachine) -> VirtualMachine {
    VirtualMachine { status: None, ..vm.clone() }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::{applied, nothing, rendered, vm};

    fn texts(vm: &VirtualMachine, observed: &Observed, around: &Surroundings) -> (Vec<String>, Vec<String>) {
        let found = findings(vm, observed, &rendered(vm, observed), &[], around);
        let (attention, notes): (Vec<_>, Vec<_>) = found.into_iter().partition(|finding| finding.needs_attention);
        let texts = |findings: Vec<Finding>| findings.into_iter().map(|finding| finding.text).collect();
        (texts(attention), texts(notes))
    }

    const LEGACY: &str = "ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch:latest";

    #[test]
    fn each_matter_is_named() {
        type Edit = fn(&mut Value);
        let around = Surroundings {
            open_displays: Some(BTreeSet::from(["apple-display-secret".into()])),
            has_image_repository: Some(false),
            pools: Some(BTreeSet::from(["here".into()])),
        };
        let cases: [(Edit, bool, &str); 8] = [
            (
                |vm| vm["spec"]["image"] = json!({ "source": LEGACY }),
                false,
                "it goes on with the runner of the VM-Operator",
            ),
            (
                |vm| vm["spec"]["image"] = json!({ "source": LEGACY }),
                true,
                "mounts the claim vmop-image-repository, which does not exist",
            ),
            (
                |vm| vm["spec"]["image"] = json!({ "repository": "own", "path": "runner" }),
                true,
                "the image own/runner is no runner of the VM-Operator that the configuration lists",
            ),
            (|_| (), false, "it gets our runner"),
            (
                |vm| vm["spec"]["runnerTemplate"] = json!({ "source": "x.ftl" }),
                true,
                "spec.runnerTemplate.source x.ftl",
            ),
            (|vm| vm["spec"]["pools"] = json!(["here", "gone"]), true, "pools that do not exist: gone"),
            (|vm| vm["spec"]["cloudInit"] = json!({ "userData": {} }), false, "cloud-init runs once more"),
            (|_| (), true, "the display Secret apple-display-secret has no password"),
        ];
        for (edit, needs_attention, expected) in cases {
            let apple = vm(edit);
            let observed = applied(&rendered(&apple, &nothing()), |_, _| ());
            let (attention, notes) = texts(&apple, &observed, &around);
            let found = if needs_attention { &attention } else { &notes };
            assert!(found.iter().any(|text| text.contains(expected)), "{expected:?} in {attention:?} {notes:?}");
        }
        // What could not be read is not said to be wrong.
        let apple = vm(|vm| vm["spec"]["pools"] = json!(["gone"]));
        let observed = applied(&rendered(&apple, &nothing()), |_, _| ());
        assert_eq!(texts(&apple, &observed, &Surroundings::default()).0, Vec::<String>::new());
    }

    #[test]
    fn claims_that_are_new_are_told_from_those_with_former_names() {
        let apple = vm(|_| ());
        let around = Surroundings::default();
        let (attention, notes) = texts(&apple, &nothing(), &around);
        assert!(attention.is_empty(), "{attention:?}");
        assert!(
            notes.iter().any(|note| note.starts_with("claims are created") && note.contains("apple-core-disk")),
            "{notes:?}"
        );
        // It runs, and its disk is not there.
        let all = rendered(&apple, &nothing());
        let pod: Vec<Rendered> = all.iter().filter(|object| object.key.is_pod()).cloned().collect();
        let (attention, _) = texts(&apple, &applied(&pod, |_, _| ()), &around);
        assert!(attention[0].contains("are created empty: apple-core-disk, apple-runner-data"), "{attention:?}");
        // Release 3.3 had other names.
        let mut old = all.clone();
        for object in old.iter_mut().filter(|object| object.key.is_claim()) {
            let name = if object.key.name.contains("core") { "core-disk-apple-0" } else { "runner-data-apple-0" };
            object.key.name = name.into();
            std::sync::Arc::make_mut(&mut object.value)["metadata"]["name"] = json!(name);
        }
        let (attention, notes) = texts(&apple, &applied(&old, |_, _| ()), &around);
        assert!(attention.is_empty(), "{attention:?}");
        assert!(
            notes.contains(&"claims keep their former names: core-disk-apple-0, runner-data-apple-0".into()),
            "{notes:?}"
        );
    }
}
