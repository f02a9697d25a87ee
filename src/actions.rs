//! What a person does to a VM, for the programs that let people do it.
//!
//! An action gets a client with the person's own rights and typed input. It returns a typed result, or an error that names the
//! cause. It never prints, and its errors name no option of a command line: the caller adds how to go on.
//!
//! | action | what it does |
//! |---|---|
//! | [`VmHandle::change`] | writes what was decided about a VM, and decides again if somebody else has changed the VM meanwhile |
//! | [`power::decide`] | says what starting, stopping, restarting or resetting a VM writes, and why it is refused |
//! | [`create::manifest`] | makes the manifest of a new VM |
//! | [`edit::decide`] | says what another number of CPUs, another CD or a larger disk writes, and why it is refused |
//! | [`pool::PoolHandle`] | gives a VM of a pool to a user, and takes it back |
//! | [`rollout::next`] | says which VMs of a rollout are restarted next, and when it stops |
//! | [`display::open`] | gives a viewer the address of a VM's display and the password that lets it in |
//! | [`VmHandle::pod`] | finds the Pod in which the guest runs |

pub mod create;
pub mod display;
pub mod edit;
pub mod pool;
pub mod power;
pub mod rollout;
pub mod write;

use std::fmt;

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::ListParams,
    core::{DynamicObject, NamespaceResourceScope},
};
use serde_json::Value;

use crate::{
    api::{StoredVm, VirtualMachine, stored},
    object::INSTANCE_LABEL,
    observed::vms_pod::vms_pod,
    ownership::Applier,
};

/// A VM of the cluster as it was read.
#[derive(Clone)]
pub struct FoundVm {
    /// As the API server has it, with all its fields, of which this program knows perhaps not all.
    pub object: DynamicObject,
    /// What this program understands of it.
    pub vm: VirtualMachine,
}

impl FoundVm {
    /// # Errors
    /// If the object is no VM.
    pub fn new(object: DynamicObject) -> Result<Self, serde_json::Error> {
        let vm = stored::read(&serde_json::to_string(&object)?)?;
        Ok(Self { object, vm })
    }

    /// Its namespace.
    pub fn namespace(&self) -> String {
        self.vm.namespace().unwrap_or_default()
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.vm.name_any()
    }
}

/// How a change is sent. It has the UID of the VM, so that another VM of its name is not changed.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// As a merge patch.
    Merge(Value),
    /// As a forced server-side apply.
    Apply(Value),
}

/// What follows for a VM from what a person wants.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision<T = ()> {
    /// Nothing is to be done, because of this.
    Unchanged(String),
    /// This is to be written.
    Write {
        /// What is written.
        change: Change,
        /// Who else applies a field that is written, and so may take it back, and the field of `spec.vm`.
        applier: Option<(Applier, &'static str)>,
        /// What the person expects of it.
        expected: T,
    },
}

/// How a change is tried without being made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trial {
    /// It is not sent.
    Client,
    /// The API server says whether it would accept it.
    Server,
}

/// Why a field that a GitOps controller applies is not written.
fn from_git(applier: &Applier, field: &str) -> String {
    let since = applier.since.as_ref().map(|time| format!(" (its last change: {})", time.0)).unwrap_or_default();
    format!(
        "{} applies spec.vm.{field} from Git{since}, and takes back what others write; change it in Git",
        applier.manager
    )
}

/// A VM of the cluster, and the client that acts on it.
#[derive(Clone)]
pub struct VmHandle {
    client: Client,
    namespace: String,
    name: String,
}

impl VmHandle {
    /// The VM of that name. Nothing is asked of the API server yet.
    pub fn new(client: Client, namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { client, namespace: namespace.into(), name: name.into() }
    }

    /// The client, for requests about more than the VM.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Its namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Objects of a kind in the VM's namespace.
    fn api<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The name of the Pod in which the guest of this VM, as it was read, runs: decided by [`vms_pod`]. `None`: there is none.
    ///
    /// # Errors
    /// The error of a request.
    pub async fn pod(&self, vm: &VirtualMachine) -> kube::Result<Option<String>> {
        let parameters = ListParams::default().labels(&format!("{INSTANCE_LABEL}={}", self.name));
        let pods = self.api::<Pod>().list_metadata(&parameters).await?.items;
        Ok(vms_pod(vm, &pods).map(ResourceExt::name_any))
    }

    /// The VM as it is now.
    ///
    /// # Errors
    /// The error of the request.
    pub async fn get(&self) -> kube::Result<VirtualMachine> {
        self.api::<StoredVm>().get(&self.name).await.map(|StoredVm(vm)| vm)
    }
}

impl fmt::Display for VmHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vm {}/{}", self.namespace, self.name)
    }
}
