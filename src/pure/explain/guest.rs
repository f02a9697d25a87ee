//! How far the guest of a running VM is, as the VM's status says. A guest need not have an agent, so nothing of this is a cause.

use super::Facts;
use crate::api::conditions::BOOTED;

/// The state of the stage, and what is known: the agent, the address.
pub(super) fn state(facts: &Facts) -> (&'static str, String) {
    let status = facts.vm.status.as_ref();
    let has_address = status.is_some_and(|status| status.addresses.iter().flatten().next().is_some());
    let lacks_address = !has_address && facts.vm.spec.vm.networks.iter().any(|network| network.pod.is_some());
    let system = status.and_then(|status| status.runner.osinfo.as_ref()?["pretty-name"].as_str());
    let Some(booted) = facts.condition(BOOTED) else {
        return ("-", "its runner does not say whether it has booted".into());
    };
    match booted.status.as_str() {
        "True" if lacks_address => ("waits", "its agent answers, and it has no address yet".into()),
        "True" => (
            "ok",
            system.map_or_else(|| "its agent answers".to_owned(), |system| format!("its agent answers: {system}")),
        ),
        _ => ("waits", missing_agent(facts)),
    }
}

/// Why nothing says that the guest has booted. What cloud-init does in the guest the status does not have.
fn missing_agent(facts: &Facts) -> String {
    let installs = if facts.vm.spec.cloud_init.is_some() { ", or cloud-init has not installed it yet" } else { "" };
    format!("its agent (qemu-guest-agent) has not answered: the guest still boots, or has no agent{installs}")
}
