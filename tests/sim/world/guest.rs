//! The guests, and what the agents in their Pods report of them.

use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use vm_operator::runner_config::ConfigFile;

use super::{Step, World};
use crate::{
    api::{
        kinds::kind,
        request::Target,
        store::{Store, seconds},
    },
    manager::NAMESPACE,
};

/// What a guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    Starting,
    Booted,
    /// It has ended, for the reason that its agent reports.
    Down(&'static str),
}

impl Power {
    pub fn is_down(self) -> bool {
        matches!(self, Self::Down(_))
    }
}

/// The reason that an agent reports of a guest that has shut itself down.
pub const SHUTDOWN: &str = "GuestShutdown";

/// A guest: QEMU runs.
#[derive(Clone, Debug)]
pub struct Guest {
    pub pod: Target,
    pub node: String,
    /// The name and UID of the VM that owns its Pod.
    pub vm: (String, String),
    /// Names and UIDs of the claims on which it has its disks, and whether it writes to them.
    pub claims: Vec<(String, String, bool)>,
    pub power: Power,
    /// The runner's configuration, as the agent has read it.
    pub config: String,
    /// What was reported last: the agent reports again only if that has changed.
    pub reported: Option<(Power, String)>,
    pub since: Timestamp,
    /// Whether it is one: a person's Pod may mount a claim, too.
    pub is_of_vm: bool,
}

pub fn steps(world: &World, store: &Store) -> Vec<Step> {
    let mut steps = Vec::new();
    let heard = |guest: &Guest| guest.is_of_vm && !world.lost.contains_key(&*guest.node);
    for (pod, guest) in world.guests.iter().filter(|(_, guest)| heard(guest)) {
        if guest.power == Power::Starting {
            steps.push(Step::Boot(pod.clone()));
        }
        if guest.reported.as_ref() != Some(&guest.said()) && store.get(&report_of(pod)).is_some() {
            steps.push(Step::Report(pod.clone()));
        }
        if config_of(&guest.vm.0, store).is_some_and(|config| config != guest.config) {
            steps.push(Step::Refresh(pod.clone()));
        }
    }
    steps
}

impl Guest {
    /// Whether its runner does not start it again: it has shut itself down, and its VM is to stay down then.
    pub fn stays_down(&self) -> bool {
        self.power == Power::Down(SHUTDOWN) && self.config.contains("guestShutdownStops: true")
    }

    /// Whether its agent has reported that.
    pub fn has_said_that_it_stays_down(&self) -> bool {
        self.stays_down() && self.reported.as_ref().is_some_and(|(power, _)| *power == self.power)
    }

    /// What there is to report.
    fn said(&self) -> (Power, String) {
        (self.power, self.config.clone())
    }
}

/// The configuration that the kubelet mounts into the Pod of a VM, if the runner can read it.
pub fn config_of<'a>(vm: &str, store: &'a Store) -> Option<&'a str> {
    let map = store.get(&Target::new(kind("ConfigMap"), NAMESPACE, vm))?;
    map["data"]["config.yaml"].as_str().filter(|text| text.starts_with("/Runner") || text.contains("\n"))
}

/// The kubelet has put a changed configuration into the Pod, and the agent has read it.
pub fn refresh(world: &mut World, pod: &str, store: &Store) {
    if let Some(guest) = world.guests.get_mut(pod)
        && let Some(config) = config_of(&guest.vm.0, store)
    {
        guest.config = config.to_owned();
    }
}

fn report_of(pod: &str) -> Target {
    Target::new(kind("VmReport"), NAMESPACE, pod)
}

/// The agent writes what it knows into the report that has the UID of its Pod as its name.
pub fn report(world: &mut World, pod: &str, store: &mut Store, now: Timestamp) {
    let Some(guest) = world.guests.get_mut(pod).filter(|guest| guest.is_of_vm) else { return };
    let (is_up, reason) = match guest.power {
        Power::Down(reason) => (false, reason),
        Power::Starting | Power::Booted => (true, "Started"),
    };
    let since = if is_up { guest.since } else { now };
    let condition = |type_: &str, is_true: bool, reason: &str| {
        json!({
            "type": type_, "status": if is_true { "True" } else { "False" }, "reason": reason, "message": "",
            "lastTransitionTime": seconds(since),
        })
    };
    let running = condition("Running", is_up, reason);
    let booted = condition("Booted", guest.power == Power::Booted, reason);
    let report = report_of(pod);
    if store.get(&report).is_none() {
        return;
    }
    guest.reported = Some(guest.said());
    let digest = ConfigFile::digest(&guest.config);
    store.write(now, &report, "vm-runner", true, |report| {
        report["status"] = json!({
            "conditions": [running, booted], "cpus": u8::from(is_up), "ram": if is_up { "1000000000" } else { "0" },
            "runnerVersion": "sim", "configDigest": digest,
        });
    });
}
