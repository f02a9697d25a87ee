//! People who do something to VMs at any time.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use vm_operator::api::VirtualMachine;
use vm_operator::object::INSTANCE_LABEL;

use crate::bench::load;
use crate::scale::ours::Ours;

/// What a person does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Create,
    Delete,
    Start,
    Stop,
    Edit,
}

/// What is done how often.
const ACTIONS: [Action; 10] = [
    Action::Create,
    Action::Delete,
    Action::Start,
    Action::Start,
    Action::Start,
    Action::Stop,
    Action::Stop,
    Action::Edit,
    Action::Edit,
    Action::Edit,
];

/// Some people with VMs.
pub struct People {
    client: Client,
    namespace: String,
    ours: Ours,
    random: fastrand::Rng,
    /// The VMs by number, each with whether it shall run.
    vms: BTreeMap<usize, bool>,
    /// The number of the next VM.
    next: usize,
    /// About how many VMs there shall be.
    count: usize,
}

impl People {
    /// Creates VMs.
    pub async fn with(
        client: Client,
        namespace: &str,
        ours: Ours,
        random: fastrand::Rng,
        count: usize,
    ) -> Result<Self> {
        ours.add("POST vms", count);
        load::create(&client, namespace, 0..count).await?;
        let vms = (0..count).map(|number| (number, true)).collect();
        Ok(Self { client, namespace: namespace.to_owned(), ours, random, vms, next: count, count })
    }

    /// The names of the VMs, each with whether it shall run.
    pub fn vms(&self) -> BTreeMap<String, bool> {
        self.vms.iter().map(|(number, runs)| (load::name(*number), *runs)).collect()
    }

    /// Does something to some VM.
    pub async fn act(&mut self) -> Result<()> {
        let chosen = ACTIONS[self.random.usize(0..ACTIONS.len())];
        // So that there are about as many all the time.
        let action = match chosen {
            Action::Delete if self.vms.len() < self.count * 9 / 10 => Action::Create,
            Action::Create if self.vms.len() > self.count * 11 / 10 => Action::Delete,
            other => other,
        };
        let nth = self.random.usize(0..self.vms.len().max(1));
        let Some(number) = self.vms.keys().nth(nth).copied() else { return Ok(()) };
        match action {
            Action::Create => self.create().await,
            Action::Delete => self.delete(number).await,
            Action::Start => self.set_state(number, true).await,
            Action::Stop => self.set_state(number, false).await,
            Action::Edit => {
                let cpus = self.random.u32(1..5);
                self.patch(number, json!({ "spec": { "vm": { "currentCpus": cpus } } })).await
            }
        }
    }

    async fn create(&mut self) -> Result<()> {
        let number = self.next;
        self.next += 1;
        self.ours.add("POST vms", 1);
        load::create(&self.client, &self.namespace, number..number + 1).await?;
        self.vms.insert(number, true);
        Ok(())
    }

    /// With its disks, which are kept otherwise.
    async fn delete(&mut self, number: usize) -> Result<()> {
        let name = load::name(number);
        let vms: Api<VirtualMachine> = Api::namespaced(self.client.clone(), &self.namespace);
        vms.delete(&name, &DeleteParams::background()).await.with_context(|| format!("deleting {name}"))?;
        self.vms.remove(&number);
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &self.namespace);
        let of_vm = ListParams::default().labels(&format!("{INSTANCE_LABEL}={name}"));
        self.ours.add("DELETECOLLECTION persistentvolumeclaims", 1);
        let deleted = claims.delete_collection(&DeleteParams::background(), &of_vm).await;
        deleted.with_context(|| format!("deleting the claims of {name}")).map(drop)
    }

    async fn set_state(&mut self, number: usize, runs: bool) -> Result<()> {
        let state = if runs { "Running" } else { "Stopped" };
        self.patch(number, json!({ "spec": { "vm": { "state": state } } })).await?;
        self.vms.insert(number, runs);
        Ok(())
    }

    async fn patch(&self, number: usize, patch: Value) -> Result<()> {
        let name = load::name(number);
        let vms: Api<VirtualMachine> = Api::namespaced(self.client.clone(), &self.namespace);
        self.ours.add("PATCH vms", 1);
        vms.patch(&name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .with_context(|| format!("patching {name}"))
            .map(drop)
    }
}
