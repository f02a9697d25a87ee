//! The resources, and what a container gets of each. Pure.
//!
//! | resource | on | a container gets |
//! |---|---|---|
//! | `vmoperator.jdrupes.org/kvm` | nodes on which a trial of KVM has succeeded | `/dev/kvm` |
//! | `vmoperator.jdrupes.org/machine` | every node | what the node has of `/dev/kvm`, `/dev/net/tun`, `/dev/vhost-net`; no `/dev/kvm` if the trial has failed |
//! | `vmoperator.jdrupes.org/kvm-trial` | nodes with `/dev/kvm` | `/dev/kvm`, for the trial |
//!
//! Who gets `/dev/kvm` by one of the first two also gets the result of the trial, see [`crate::kvm`].

use super::messages::{ContainerAllocateResponse, Device, DeviceSpec, HEALTHY};
use crate::kvm::{self, TrialResult};

/// How many VMs of a node can have a device. Device files are shared, so this is only more than a node can run.
const SHARED: usize = 1000;

/// What the node has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// There is `/dev/kvm`.
    pub kvm: bool,
    /// There is `/dev/net/tun`.
    pub tun: bool,
    /// There is `/dev/vhost-net`.
    pub vhost_net: bool,
    /// The result of the trial of KVM, if there was one.
    pub trial: Option<TrialResult>,
}

impl Inventory {
    /// What is known about KVM. `None`: there was no trial yet.
    pub fn kvm_result(&self) -> Option<TrialResult> {
        if self.kvm { self.trial.clone() } else { Some(TrialResult::failed("the node has no /dev/kvm")) }
    }
}

/// A resource that the plugin offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// KVM, where it works.
    Kvm,
    /// What there is.
    Machine,
    /// `/dev/kvm` for the trial.
    Trial,
}

impl Resource {
    /// All resources.
    pub const ALL: [Self; 3] = [Self::Kvm, Self::Machine, Self::Trial];

    /// The name in Pods and Nodes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "vmoperator.jdrupes.org/kvm",
            Self::Machine => "vmoperator.jdrupes.org/machine",
            Self::Trial => "vmoperator.jdrupes.org/kvm-trial",
        }
    }

    /// The name of the plugin's socket in the kubelet's folder.
    pub fn socket(self) -> &'static str {
        match self {
            Self::Kvm => "vm-operator-kvm.sock",
            Self::Machine => "vm-operator-machine.sock",
            Self::Trial => "vm-operator-kvm-trial.sock",
        }
    }

    /// How many containers of the node can have it.
    pub fn count(self, inventory: &Inventory) -> usize {
        match self {
            Self::Kvm if inventory.kvm_result().is_some_and(|result| result.works()) => SHARED,
            Self::Kvm => 0,
            Self::Machine => SHARED,
            Self::Trial => usize::from(inventory.kvm),
        }
    }

    /// The units of it.
    pub fn devices(self, inventory: &Inventory) -> Vec<Device> {
        let device = |number| Device { id: format!("{number}"), health: HEALTHY.to_owned() };
        (0..self.count(inventory)).map(device).collect()
    }

    /// What a container gets that has one or more units of it.
    pub fn allocation(self, inventory: &Inventory) -> ContainerAllocateResponse {
        let result = inventory.kvm_result();
        let may_work = result.as_ref().is_none_or(TrialResult::works);
        let all =
            [("/dev/kvm", inventory.kvm), ("/dev/net/tun", inventory.tun), ("/dev/vhost-net", inventory.vhost_net)];
        let files = all.into_iter().filter(|(_, exists)| *exists).map(|(file, _)| file);
        let is_given = |file: &&str| match self {
            Self::Kvm | Self::Trial => *file == "/dev/kvm",
            Self::Machine => *file != "/dev/kvm" || may_work,
        };
        let device = |file: &str| DeviceSpec {
            container_path: file.to_owned(),
            host_path: file.to_owned(),
            permissions: "rw".to_owned(),
        };
        let result = result.filter(|_| self != Self::Trial);
        ContainerAllocateResponse {
            envs: result.map(|result| (kvm::VARIABLE.to_owned(), result.text())).into_iter().collect(),
            devices: files.filter(is_given).map(device).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKS: &str = r#"{"problem":null}"#;

    fn given(resource: Resource, inventory: &Inventory) -> (Vec<String>, Option<String>) {
        let ContainerAllocateResponse { mut envs, devices } = resource.allocation(inventory);
        assert!(devices.iter().all(|device| device.host_path == device.container_path && device.permissions == "rw"));
        let result = envs.remove("VM_RUNNER_KVM_TRIAL");
        assert!(envs.is_empty(), "{envs:?}");
        (devices.into_iter().map(|device| device.host_path).collect(), result)
    }

    /// The number of units of kvm, machine and kvm-trial, what a container gets with kvm and with machine, and the result of the trial.
    #[test]
    fn what_a_node_offers_follows_from_its_devices_and_the_trial() {
        let (works, fails) = (Some(TrialResult::default()), Some(TrialResult::failed("no VMX")));
        let inventory =
            |kvm, tun, vhost_net, trial: &Option<TrialResult>| Inventory { kvm, tun, vhost_net, trial: trial.clone() };
        let none = r#"{"problem":"the node has no /dev/kvm"}"#;
        let no_vmx = r#"{"problem":"no VMX"}"#;
        let all = vec!["/dev/kvm", "/dev/net/tun", "/dev/vhost-net"];
        for (inventory, counts, machine, result) in [
            (inventory(false, false, false, &None), [0, 1000, 0], vec![], Some(none)),
            // The result of a trial of a device that has gone does not count.
            (inventory(false, true, false, &works), [0, 1000, 0], vec!["/dev/net/tun"], Some(none)),
            // Before the trial the runner of a VM with `auto` makes its own.
            (inventory(true, true, true, &None), [0, 1000, 1], all.clone(), None),
            (inventory(true, true, true, &works), [1000, 1000, 1], all, Some(WORKS)),
            (inventory(true, true, false, &fails), [0, 1000, 1], vec!["/dev/net/tun"], Some(no_vmx)),
        ] {
            let counted = Resource::ALL.map(|resource| resource.count(&inventory));
            assert_eq!(counted, counts, "{inventory:?}");
            let devices = Resource::ALL.map(|resource| resource.devices(&inventory).len());
            assert_eq!(devices, counts, "{inventory:?}");
            let machine = machine.into_iter().map(str::to_owned).collect();
            assert_eq!(given(Resource::Machine, &inventory), (machine, result.map(str::to_owned)), "{inventory:?}");
        }
    }

    #[test]
    fn kvm_is_one_device_and_the_trial_does_not_know_the_last_result() {
        let inventory = Inventory { kvm: true, tun: true, vhost_net: true, trial: Some(TrialResult::default()) };
        assert_eq!(given(Resource::Kvm, &inventory), (vec!["/dev/kvm".to_owned()], Some(WORKS.to_owned())));
        assert_eq!(given(Resource::Trial, &inventory), (vec!["/dev/kvm".to_owned()], None));
    }

    #[test]
    fn the_names_of_units_are_unique() {
        let names: std::collections::HashSet<String> =
            Resource::Machine.devices(&Inventory::default()).into_iter().map(|device| device.id).collect();
        assert_eq!(names.len(), SHARED);
    }
}
