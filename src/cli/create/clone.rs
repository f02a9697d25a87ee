//! A disk that the storage clones from a claim.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        core::v1::PersistentVolumeClaim,
        storage::v1::{CSIDriver, CSINode, StorageClass},
    },
    apimachinery::pkg::api::resource::Quantity as Amount,
};
use kube::{
    Api, Client,
    api::{ApiResource, ListParams},
};

use super::Options;
use crate::{
    api::Quantity,
    cli::{
        output::Failure,
        vms::{failure, refused_about},
    },
    process::ErrorChain,
};

impl Options {
    /// What a clone must have of the claim: its volume mode; its size and class, where nobody said another one.
    pub(super) async fn clone_of(
        &self,
        name: &str,
        size: &mut String,
        class: &mut Option<String>,
    ) -> Result<Option<String>, Failure> {
        let cluster = self.cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
        let what = format!("persistentvolumeclaim/{name}");
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
        let claim = match claims.get(name).await {
            Ok(claim) => claim,
            Err(error) => {
                let resource = ApiResource::erase::<PersistentVolumeClaim>(&());
                let (client, namespace) = (&cluster.client, Some(cluster.namespace.as_str()));
                let line = refused_about(client, &resource, &what, &["get"], namespace, &error).await;
                return Err(failure(line, &error));
            }
        };
        let spec = claim.spec.unwrap_or_default();
        let has = |list: Option<BTreeMap<String, Amount>>| list.and_then(|list| Some(list.get("storage")?.0.clone()));
        let requested = spec.resources.and_then(|resources| has(resources.requests));
        let found = has(claim.status.and_then(|status| status.capacity)).or(requested);
        match (&self.disk, found) {
            (None, Some(found)) => *size = found,
            (Some(wanted), Some(found))
                if Quantity::parse(&found).is_ok_and(|found| wanted.bytes() < found.bytes()) =>
            {
                return Err(Failure::usage(format!("--disk {wanted} is too small: the claim {name} has {found}")));
            }
            _ => {}
        }
        if class.is_none() {
            *class = spec.storage_class_name;
        }
        if let Some(class) = class {
            can_clone(&cluster.client, class).await?;
        }
        Ok(spec.volume_mode)
    }
}

/// A provisioner that is no CSI driver ignores what is to be cloned, and makes an empty volume. Those of Kubernetes itself stand for CSI drivers
/// of other names. Who may not read classes and drivers finds out later.
async fn can_clone(client: &Client, class: &str) -> Result<(), Failure> {
    let Ok(found) = Api::<StorageClass>::all(client.clone()).get(class).await else { return Ok(()) };
    let provisioner = found.provisioner;
    if provisioner.starts_with("kubernetes.io/") {
        return Ok(());
    }
    // A driver need not have such an object; then nodes list it.
    let nodes = async {
        let nodes = Api::<CSINode>::all(client.clone()).list(&ListParams::default()).await?;
        Ok::<_, kube::Error>(nodes.into_iter().any(|node| node.spec.drivers.iter().any(|it| it.name == provisioner)))
    };
    match (Api::<CSIDriver>::all(client.clone()).get_opt(&provisioner).await, nodes.await) {
        (Ok(None), Ok(false)) => Err(Failure::new(format!(
            "the storage class {class} can't clone: its provisioner {provisioner} is no CSI driver (kubectl get csidrivers), and would make an empty \
             disk; take --image ./FILE or https://..., or fill an empty disk by a Pod that mounts both claims"
        ))),
        _ => Ok(()),
    }
}
