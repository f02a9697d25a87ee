//! What must hold when nothing has happened for long: the status says what is true.

use serde_json::Value;

use super::{changes_since, made_at, restarted};
use crate::{
    api::{
        kinds::kind,
        request::Target,
        store::{Store, bytes},
    },
    people::{UNNAMED, disk},
    world::{Guest, Power, World, has_ended, is_deleting, mounted, uid},
};

/// A VM, and what is true of it.
struct Found<'a> {
    name: &'a str,
    vm: &'a Value,
    /// The guest that has booted in a Pod of which the VM is an owner, or that it has on its claims: the owner of its Pod may have been taken away.
    guest: Option<&'a Guest>,
    /// Whether the VM is an owner of its Pod.
    is_owned: bool,
}

/// Checks each VM when nothing happens any more; the error says which one is wrong.
pub fn at_rest(store: &Store, world: &World) -> Result<(), String> {
    super::pools::at_rest(store)?;
    super::vmctl::at_rest(store)?;
    store.of("VirtualMachine").try_for_each(|(target, vm)| {
        let found = Found::new(&target.name, vm, store, world);
        found.power()?;
        found.guest_as_reported()?;
        found.is_restarted(store)?;
        found.storage(store)?;
        found.says_what_is_kept(store)?;
        found.writes_alone(store)
    })
}

impl<'a> Found<'a> {
    fn new(name: &'a str, vm: &'a Value, store: &Store, world: &'a World) -> Self {
        let is_owner_of = |object: Option<&Value>| {
            let owners = object.map(|object| &object["metadata"]["ownerReferences"]).and_then(Value::as_array);
            owners.into_iter().flatten().any(|owner| owner["uid"] == vm["metadata"]["uid"])
        };
        let booted = || world.guests.values().filter(|guest| guest.power == Power::Booted);
        let own = booted().find(|guest| is_owner_of(store.get(&guest.pod)));
        let is_on_claim = |guest: &&Guest| guest.vm.0 == name && !guest.claims.is_empty();
        Self { name, vm, guest: own.or_else(|| booted().find(is_on_claim)), is_owned: own.is_some() }
    }

    fn condition(&self, type_: &str) -> &str {
        let mut conditions = self.vm["status"]["conditions"].as_array().into_iter().flatten();
        let found = conditions.find(|condition| condition["type"] == type_);
        found.and_then(|condition| condition["status"].as_str()).unwrap_or_default()
    }

    fn is_true(&self, type_: &str) -> bool {
        self.condition(type_) == "True"
    }

    /// Running and Ready say whether the guest runs, and whether it should.
    fn power(&self) -> Result<(), String> {
        let (runs, is_owned) = (self.guest.is_some(), self.is_owned);
        if self.is_true("Running") && !runs || !self.is_true("Running") && is_owned {
            return Err(format!(
                "the status of {} says Running={}, and its guest runs: {runs} (in a Pod of its own: {is_owned})",
                self.name,
                self.is_true("Running")
            ));
        }
        let wants = self.vm["spec"]["vm"]["state"] == "Running";
        if self.is_true("Ready") && wants != runs {
            return Err(format!(
                "{} is Ready, its state should be Running: {wants}, and its guest runs: {runs}",
                self.name
            ));
        }
        Ok(())
    }

    /// What the status says of the guest is what the agent in its Pod has reported, and nothing that an earlier one has.
    fn guest_as_reported(&self) -> Result<(), String> {
        let (status, is_up) = (&self.vm["status"], self.guest.filter(|_| self.is_owned));
        let cpus = status["cpus"].as_i64().unwrap_or_default();
        let node = status["nodeName"].as_str().unwrap_or_default();
        let is_said = match is_up {
            Some(guest) => cpus == 1 && node == guest.node && self.is_true("Booted"),
            None => self.guest.is_some() || cpus == 0 && !self.is_true("Booted"),
        };
        if is_said {
            return Ok(());
        }
        Err(format!(
            "the status of {} says {cpus} CPUs, node {node:?} and Booted={}, and its guest is on {:?}",
            self.name,
            self.condition("Booted"),
            is_up.map(|guest| &guest.node)
        ))
    }

    /// A VM that is Ready has been restarted since a person last wanted that.
    fn is_restarted(&self, store: &Store) -> Result<(), String> {
        let Some(guest) = self.guest.filter(|_| self.is_owned && self.is_true("Ready")) else { return Ok(()) };
        let (made, of) = (made_at(&uid(store.get(&guest.pod).unwrap_or(&Value::Null)), store), uid(self.vm));
        let is_later = changes_since(made, store, &of)
            .any(|(change, before, after)| change.version > made && restarted(before) != restarted(after));
        if is_later {
            return Err(format!("{} is Ready, and was not restarted since a person wanted it", self.name));
        }
        Ok(())
    }

    /// StorageReady is True only if the disk's claim exists, is not being deleted and is as large as the VM wants it.
    fn storage(&self, store: &Store) -> Result<(), String> {
        // Which claim a disk without a name has is another check.
        if !self.is_true("StorageReady") || self.name == UNNAMED {
            return Ok(());
        }
        let claim = store.get(&Target::new(kind("PersistentVolumeClaim"), super::NAMESPACE, &disk(self.name)));
        let wanted =
            &self.vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"];
        let is_large = |claim: &Value| bytes(&claim["status"]["capacity"]["storage"]) >= bytes(wanted);
        if claim.is_some_and(|claim| !is_deleting(claim) && claim["status"]["phase"] == "Bound" && is_large(claim)) {
            return Ok(());
        }
        Err(format!("StorageReady of {} is True, and the claim of its disk is not as it should be", self.name))
    }

    /// An ended Pod stays as long as a claim would go with it, and Ready says that and nothing else.
    fn says_what_is_kept(&self, store: &Store) -> Result<(), String> {
        let mut conditions = self.vm["status"]["conditions"].as_array().into_iter().flatten();
        let ready = conditions.find(|condition| condition["type"] == "Ready");
        let message = ready.and_then(|ready| ready["message"].as_str()).unwrap_or_default();
        let is_own = |pod: &Value| pod["metadata"]["ownerReferences"][0]["uid"] == self.vm["metadata"]["uid"];
        let claim = |name: &str| store.get(&Target::new(kind("PersistentVolumeClaim"), super::NAMESPACE, name));
        let kept = store.of("Pod").filter(|(_, pod)| is_own(pod) && has_ended(pod)).find_map(|(_, pod)| {
            let mut claims = mounted(pod).into_iter().map(|(name, _)| name);
            claims.find(|name| !super::is_runner_data(name) && claim(name).is_some_and(is_deleting))
        });
        match kept {
            Some(claim) if self.vm["spec"]["vm"]["state"] == "Running" && !message.contains(&claim) => {
                Err(format!("the ended Pod of {} is kept for {claim}, and Ready says {message:?}", self.name))
            }
            _ => Ok(()),
        }
    }

    /// A VM that runs and is Ready is the only one that writes to its disk.
    fn writes_alone(&self, store: &Store) -> Result<(), String> {
        let is_checked = self.is_owned && self.is_true("Ready") && self.name != UNNAMED;
        let Some(guest) = self.guest.filter(|_| is_checked) else { return Ok(()) };
        let writes = |pod: &Value| mounted(pod).iter().any(|(claim, writes)| *writes && *claim == disk(self.name));
        let mut others = store.of("Pod").filter(|(pod, _)| **pod != guest.pod);
        match others.find(|(_, pod)| !has_ended(pod) && writes(pod)) {
            Some((other, _)) => Err(format!("{} is Ready, and {} can write to its disk", self.name, other.name)),
            None => Ok(()),
        }
    }
}
