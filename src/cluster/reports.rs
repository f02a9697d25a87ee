//! Writes the reports of runners: the manager creates, changes and deletes them, and takes the runner's part of the status over.

use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, Patch, Preconditions},
};
use serde_json::json;
use tracing::info;

use super::{ActionError, Cluster, NO_VERSION, applying, namespace_of};
use crate::{
    api::{StoredVm, VirtualMachine},
    ownership::RUNNER_MANAGER,
    status::reports::ReportAction,
};

impl Cluster {
    /// Executes what is to be done about the reports of a VM.
    ///
    /// # Errors
    /// The first error. The others are executed nevertheless.
    pub async fn keep_reports(&self, vm: &VirtualMachine, actions: Vec<ReportAction>) -> Result<(), ActionError> {
        let mut result = Ok(());
        for action in actions {
            let done = match self.keep_report(vm, action).await {
                Err(error) => Err(self.with_missing_rule(&namespace_of(vm), error).await),
                done => done,
            };
            result = result.and(done);
        }
        result
    }

    async fn keep_report(&self, vm: &VirtualMachine, action: ReportAction) -> Result<(), ActionError> {
        let namespace = namespace_of(vm);
        match action {
            ReportAction::Create { key, value } => {
                match self.apply_if(&namespace, &key, &value, ("resourceVersion", NO_VERSION)).await {
                    Ok(created) => {
                        self.store_applied(&key, created);
                        Ok(())
                    }
                    // It exists, and the watch reports it soon.
                    Err(kube::Error::Api(answer)) if answer.code == 409 => Ok(()),
                    Err(source) => Err(ActionError::Api { what: "create", key, source: Box::new(source) }),
                }
            }
            ReportAction::Change { key, uid, patch } => {
                self.change(&namespace, &key, &uid, "change", Patch::Merge(patch)).await?;
                info!(object = %key, "changed what the runner is told");
                self.children.metrics.wrote("patch", &key.kind);
                Ok(())
            }
            ReportAction::Delete { key, uid } => {
                let preconditions = Some(Preconditions { uid: Some(uid.clone()), resource_version: None });
                self.delete(&namespace, &key, &uid, &DeleteParams { preconditions, ..DeleteParams::default() }).await
            }
        }
    }

    /// Takes away what a runner has written into the status before it reported in an object of its own. What the manager has taken over by
    /// then stays. `None`: the VM has changed meanwhile.
    ///
    /// # Errors
    /// The error of the request.
    pub async fn release_runners_fields(&self, vm: &VirtualMachine) -> Result<Option<VirtualMachine>, kube::Error> {
        let api: Api<StoredVm> = Api::namespaced(self.client.clone(), &namespace_of(vm));
        let nothing = json!({
            "apiVersion": VirtualMachine::api_version(&()),
            "kind": VirtualMachine::kind(&()),
            "metadata": {
                "name": vm.name_any(), "uid": vm.metadata.uid, "resourceVersion": vm.metadata.resource_version,
            },
        });
        let how = applying(RUNNER_MANAGER);
        match self.requests.run(api.patch_status(&vm.name_any(), &how, &Patch::Apply(&nothing))).await {
            Ok(StoredVm(written)) => {
                self.children.metrics.wrote("status", "VirtualMachine");
                Ok(Some(written))
            }
            Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
