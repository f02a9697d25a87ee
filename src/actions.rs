//! What a person does to a VM, for the programs that let people do it.
//!
//! An action gets a client with the person's own rights and typed input. It returns a typed result, or an error that names the
//! cause. It never prints, and its errors name no option of a command line: the caller adds how to go on.
//!
//! | action | what it does |
//! |---|---|
//! | [`power::decide`] | says what starting, stopping, restarting or resetting a VM writes, and why it is refused |
//! | [`display::open`] | gives a viewer the address of a VM's display and the password that lets it in |

pub mod display;
pub mod power;

use std::fmt;

use kube::{Api, Client, Resource, core::NamespaceResourceScope};

use crate::api::{StoredVm, VirtualMachine};

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

    async fn get(&self) -> kube::Result<VirtualMachine> {
        self.api::<StoredVm>().get(&self.name).await.map(|StoredVm(vm)| vm)
    }
}

impl fmt::Display for VmHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vm {}/{}", self.namespace, self.name)
    }
}
