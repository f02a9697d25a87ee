//! What a person does to a VM, for the programs that let people do it.
//!
//! An action gets a client with the person's own rights and typed input. It returns a typed result, or an error that names the
//! cause. It never prints, and its errors name no option of a command line: the caller adds how to go on.
//!
//! | action | what it does |
//! |---|---|
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

use std::fmt;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::OwnerReference};
use kube::{Api, Client, Resource, ResourceExt, api::ListParams, core::NamespaceResourceScope};

use crate::{
    api::{StoredVm, VirtualMachine},
    object::{APP_NAME, INSTANCE_LABEL},
};

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

    /// The name of the Pod in which the guest of this VM, as it was read, runs: the one that its runner reported from, else one that is the VM's.
    /// `None`: there is none.
    ///
    /// # Errors
    /// The error of a request.
    pub async fn pod(&self, vm: &VirtualMachine) -> kube::Result<Option<String>> {
        let parameters = ListParams::default().labels(&format!("{INSTANCE_LABEL}={}", self.name));
        let pods = self.api::<Pod>().list_metadata(&parameters).await?.items;
        Ok(of_guest(vm, &pods).map(ResourceExt::name_any))
    }

    /// The VM as it is now.
    ///
    /// # Errors
    /// The error of the request.
    pub async fn get(&self) -> kube::Result<VirtualMachine> {
        self.api::<StoredVm>().get(&self.name).await.map(|StoredVm(vm)| vm)
    }
}

/// The Pod among those with the VM's name in their label in which its guest runs. A release of Helm of the same name gives its Pods that label
/// too, so what counts is who owns them.
fn of_guest<'a, P: ResourceExt>(vm: &VirtualMachine, pods: &'a [P]) -> Option<&'a P> {
    let (name, uid) = (vm.metadata.name.as_deref(), vm.metadata.uid.as_deref());
    let reported = vm.status.as_ref().and_then(|status| status.pod_uid.as_deref());
    let is_reported = |pod: &&P| reported.is_some() && pod.meta().uid.as_deref() == reported;
    let is_owned =
        |pod: &&P| uid.is_some() && pod.owner_references().iter().any(|owner| Some(owner.uid.as_str()) == uid);
    // Releases before 3.4 made a StatefulSet for each VM, and templates may.
    let is_of_set = |pod: &&P| {
        let is_set = |owner: &OwnerReference| owner.kind == "StatefulSet" && Some(owner.name.as_str()) == name;
        let is_runner = pod.labels().get("app.kubernetes.io/name").is_some_and(|program| program == APP_NAME);
        is_runner && pod.owner_references().iter().any(is_set)
    };
    let found = pods.iter().find(is_reported).or_else(|| pods.iter().find(is_owned));
    found.or_else(|| pods.iter().find(is_of_set))
}

impl fmt::Display for VmHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vm {}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::vm;

    /// A Pod with the label of the VM `apple`, of this program and with this owner.
    fn pod(name: &str, program: &str, owner: Option<(&str, &str, &str)>) -> Value {
        let owner =
            owner.map(|(kind, name, uid)| json!({ "apiVersion": "v1", "kind": kind, "name": name, "uid": uid }));
        json!({ "metadata": {
            "name": name, "uid": format!("{name}-uid"), "ownerReferences": owner.into_iter().collect::<Vec<_>>(),
            "labels": { INSTANCE_LABEL: "apple", "app.kubernetes.io/name": program },
        } })
    }

    #[test]
    fn the_pod_of_a_guest_is_reported_or_the_vms_own() {
        let own = || pod("apple", APP_NAME, Some(("VirtualMachine", "apple", "apple-uid")));
        let of_set = || pod("apple-0", APP_NAME, Some(("StatefulSet", "apple", "set-uid")));
        let of_helm = || pod("apple-web-1", "nginx", Some(("ReplicaSet", "apple-web", "rs-uid")));
        let database = || pod("apple-0", "postgresql", Some(("StatefulSet", "apple", "set-uid")));
        let lost = || pod("apple", APP_NAME, None);
        for (pods, reported, expected) in [
            (vec![], None, None),
            (vec![own()], None, Some("apple")),
            (vec![of_helm(), own()], None, Some("apple")),
            (vec![of_set(), own()], None, Some("apple")),
            (vec![of_set(), own()], Some("apple-0-uid"), Some("apple-0")),
            // The one that was reported is gone.
            (vec![of_helm(), own()], Some("former-uid"), Some("apple")),
            (vec![of_helm(), of_set()], None, Some("apple-0")),
            (vec![lost()], Some("apple-uid"), Some("apple")),
            // Of others.
            (vec![of_helm()], None, None),
            (vec![database()], None, None),
            (vec![lost()], None, None),
            (vec![pod("apple", APP_NAME, Some(("VirtualMachine", "apple", "former-uid")))], None, None),
            (vec![pod("apple-0", APP_NAME, Some(("StatefulSet", "plum", "set-uid")))], None, None),
        ] {
            let vm = vm(|vm| {
                if let Some(uid) = reported {
                    vm["status"] = json!({ "podUid": uid });
                }
            });
            let text = json!(pods).to_string();
            let pods: Vec<Pod> = serde_json::from_value(json!(pods)).unwrap();
            let found = of_guest(&vm, &pods).map(ResourceExt::name_any);
            assert_eq!(found.as_deref(), expected, "{reported:?} among {text}");
        }
    }
}
