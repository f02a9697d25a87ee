//! Which changed sets the manager would not use. It checks them in the same order (`manager::templates`).

use std::collections::HashMap;

use kube::Client;

use super::{
    super::{
        diff::{dry_run, rights::Rights},
        output::{Failure, note},
    },
    Seen,
    sources::Side,
};
use crate::{
    api::VirtualMachine,
    client::discovery::Resources,
    object::{Rendered, is_builtin_kind},
    process::ErrorChain,
    render::{
        TemplateError,
        check::{Sample, SetEffect, check, trial},
    },
};

/// The sets that are not used, with the error and the VM with which it was seen.
#[derive(Default)]
pub(in crate::cli) struct Refusals(HashMap<Option<String>, (TemplateError, Option<String>)>);

impl Refusals {
    /// Why the set of a VM is not used.
    pub fn of(&self, vm: &VirtualMachine) -> Option<(&TemplateError, Option<&String>)> {
        let refusal = self.0.get(&vm.template_set().map(str::to_owned));
        refusal.map(|(error, vm)| (error, vm.as_ref()))
    }
}

/// Checks the sets that change.
///
/// # Errors
/// If the API server does not answer.
pub(super) async fn of_sets<'a>(
    client: &Client,
    home: &str,
    resources: &Resources,
    now: &Side,
    after: &Side,
    vms: impl Iterator<Item = &'a Seen> + Clone,
) -> Result<Refusals, Failure> {
    let mut refusals = Refusals::default();
    if !after.is_checked {
        return Ok(refusals);
    }
    let rights = Rights::of_manager(client, home).await;
    for (name, set) in after.library.all() {
        let Ok(set) = set else { continue };
        let before = now.library.all().find(|(old, _)| *old == name).and_then(|(_, set)| set.as_ref().ok());
        if before.is_some_and(|before| before.version() == set.version()) {
            continue;
        }
        let users = vms.clone().filter(|seen| seen.vm.template_set() == name && seen.vm.spec.invalid.is_none());
        let users = users.map(|seen| (VirtualMachine::clone(&seen.vm), seen.observed.clone()));
        let refusal = match check(before, set, users, &after.config) {
            Err(refusal) => Some((refusal.error, Some(refusal.vm.full_name()))),
            Ok(outcome) => match lacking(&outcome, resources, &rights).await {
                Some(error) => Some((error, None)),
                None => tried(client, resources, outcome).await?,
            },
        };
        refusals.0.extend(refusal.map(|refusal| (name.map(str::to_owned), refusal)));
    }
    Ok(refusals)
}

/// A kind that the API server does not serve, or that the manager may not make. If only one VM has it, the set is used nevertheless.
async fn lacking(outcome: &SetEffect, resources: &Resources, rights: &Rights) -> Option<TemplateError> {
    for used in outcome.uses.iter().filter(|used| !is_builtin_kind(&used.kind) && !used.is_of_one_vm(outcome)) {
        let why = match resources.of(&used.kind).await {
            Ok(resource) => {
                let namespace = used.namespaces.first().cloned().unwrap_or_default();
                rights.lacking(&used.kind, &resource, &namespace).await
            }
            Err(kube::Error::Api(answer)) if answer.is_not_found() => {
                Some(format!("the API server refuses {}: {}", used.kind.kind, answer.message))
            }
            Err(_) => None,
        };
        if let Some(why) = why {
            return Some(TemplateError::refused(&used.template, why));
        }
    }
    None
}

/// Tries the objects that would change, each with an unused name, by a dry run. What the person may not try is said and left out.
async fn tried(
    client: &Client,
    resources: &Resources,
    outcome: SetEffect,
) -> Result<Option<(TemplateError, Option<String>)>, Failure> {
    let mut forbidden = Vec::new();
    for of_shape in outcome.samples {
        for Sample { vm, object, former, exists } in of_shape {
            let tried = |object: &Rendered| if exists { object.clone() } else { trial(object) };
            let kind = &object.key.kind;
            let error = match dry_run(client, &vm, resources, &tried(&object)).await {
                Ok(_) => break,
                Err(kube::Error::Api(answer)) if answer.is_forbidden() => {
                    if !forbidden.contains(kind) {
                        note(&format!("# not tried on the API server: {kind} objects: {}", answer.message));
                        forbidden.push(kind.clone());
                    }
                    break;
                }
                Err(kube::Error::Api(answer)) if matches!(answer.code, 400 | 404 | 422) => answer,
                Err(error) => return Err(Failure::unknown(format!("{}: {}", object.key, ErrorChain(&error)))),
            };
            // If it refuses the former one too, that is the VM's own matter.
            if let Some(former) = &former
                && dry_run(client, &vm, resources, &tried(former)).await.is_err()
            {
                continue;
            }
            let message = error.message.replace(&trial(&object).key.name, &object.key.name);
            let message = format!("the API server refuses {}: {message}", object.key);
            return Ok(Some((TemplateError::refused(&object.template, message), Some(vm.full_name()))));
        }
    }
    Ok(None)
}
