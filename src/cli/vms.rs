//! Which VMs a command means: names, a selector, or all.

use clap::Args;
use kube::{
    Api, ResourceExt,
    api::{ListParams, PartialObjectMeta},
};

use super::{
    cluster::{Cluster, ClusterOptions},
    output::{Failure, chain},
};
use crate::{actions::VmHandle, api::StoredVm};

/// How many VMs the API server sends at once.
const PAGE: u32 = 500;

/// The VMs that a command is for.
#[derive(Args)]
pub(super) struct VmOptions {
    /// The VMs: `NAME` or `vm/NAME`.
    #[arg(value_name = "VM", required_unless_present_any = ["selector", "all"], conflicts_with_all = ["selector", "all", "all_namespaces"])]
    vms: Vec<String>,
    /// The VMs with these labels.
    #[arg(long, short = 'l', value_name = "LABELS")]
    selector: Option<String>,
    /// All VMs of the namespace.
    #[arg(long, conflicts_with = "selector")]
    all: bool,
    /// With --selector or --all: of all namespaces.
    #[arg(long, short = 'A')]
    all_namespaces: bool,
    #[command(flatten)]
    pub cluster: ClusterOptions,
}

/// The name in `NAME` or `vm/NAME`.
///
/// # Errors
/// If it names another kind.
pub(super) fn name(text: &str) -> Result<&str, Failure> {
    match text.split_once('/') {
        None => Ok(text),
        Some(("vm" | "vms" | "virtualmachine" | "virtualmachines" | "vms.vmoperator.jdrupes.org", name)) => Ok(name),
        Some((kind, _)) => Err(Failure::usage(format!("{text}: {kind} is no VM; write NAME or vm/NAME"))),
    }
}

impl VmOptions {
    /// Finds the VMs. Names are not looked up: what happens to each VM says whether it exists.
    pub async fn find(&self, Cluster { client, namespace }: &Cluster) -> Result<Vec<VmHandle>, Failure> {
        if !self.vms.is_empty() {
            let handle = |text: &String| Ok(VmHandle::new(client.clone(), namespace, name(text)?));
            return self.vms.iter().map(handle).collect();
        }
        let vms: Api<StoredVm> = match self.all_namespaces {
            true => Api::all(client.clone()),
            false => Api::namespaced(client.clone(), namespace),
        };
        let mut parameters = ListParams::default().limit(PAGE);
        parameters.label_selector.clone_from(&self.selector);
        let mut found = Vec::new();
        loop {
            let page =
                vms.list_metadata(&parameters).await.map_err(|error| Failure::unknown(chain("list VMs", &error)))?;
            found.extend(page.items.iter().map(|vm: &PartialObjectMeta<StoredVm>| {
                VmHandle::new(client.clone(), vm.namespace().unwrap_or_default(), vm.name_any())
            }));
            match page.metadata.continue_.filter(|next| !next.is_empty()) {
                Some(next) => parameters = parameters.continue_token(&next),
                None => return Ok(found),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_named_as_kubectl_names_it() {
        for text in ["apple", "vm/apple", "vms.vmoperator.jdrupes.org/apple"] {
            assert_eq!(name(text).unwrap(), "apple");
        }
        assert!(name("pod/apple").is_err());
    }
}
