//! What the commands that change VMs have in common: their options, how a change is sent, and how they end.

use clap::{Args, ValueEnum};
use kube::{
    Client, Resource,
    api::{DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    format::ObjectFormat,
    output::Exit,
    vms::{api, exit},
    wait::Limit,
};
use crate::{api::VirtualMachine, ownership::COMMAND_MANAGER};

/// What the commands that change VMs have in common.
#[derive(Args)]
pub(super) struct WriteOptions {
    /// Say what would be done, without doing it: client asks only what the VM is, server also whether the change would be accepted.
    #[arg(long, value_name = "HOW")]
    pub dry_run: Option<DryRun>,
    /// Print the changed VM, instead of a line about it.
    #[arg(long, short, value_name = "FORMAT")]
    pub output: Option<ObjectFormat>,
    /// The name under which the API server notes the change.
    #[arg(long, value_name = "NAME", default_value = COMMAND_MANAGER)]
    pub field_manager: String,
    /// Change a field of the spec also where a GitOps controller applies it, which then takes it back.
    #[arg(long, short)]
    pub yes: bool,
    /// Wait until it is done, and say how far it is.
    #[arg(long)]
    pub wait: bool,
    #[command(flatten)]
    pub limit: Limit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum DryRun {
    Client,
    Server,
}

impl DryRun {
    /// That nothing was done, behind what would have been.
    pub fn mark(dry_run: Option<Self>) -> &'static str {
        match dry_run {
            None => "",
            Some(Self::Client) => " (dry run)",
            Some(Self::Server) => " (server dry run)",
        }
    }
}

impl WriteOptions {
    fn parameters(&self) -> PatchParams {
        PatchParams {
            field_manager: Some(self.field_manager.clone()),
            dry_run: self.dry_run == Some(DryRun::Server),
            ..PatchParams::default()
        }
    }

    /// Sends a merge patch.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn merge(
        &self,
        client: &Client,
        namespace: &str,
        name: &str,
        body: &Value,
    ) -> kube::Result<DynamicObject> {
        api(client, namespace).patch(name, &self.parameters(), &Patch::Merge(body)).await
    }

    /// Sends a forced server-side apply.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn apply(
        &self,
        client: &Client,
        namespace: &str,
        name: &str,
        body: &Value,
    ) -> kube::Result<DynamicObject> {
        let mut body = body.clone();
        body["apiVersion"] = json!(VirtualMachine::api_version(&()));
        body["kind"] = json!(VirtualMachine::kind(&()));
        let parameters = PatchParams { force: true, ..self.parameters() };
        api(client, namespace).patch(name, &parameters, &Patch::Apply(&body)).await
    }

    /// Whether the command waits for what it has written.
    pub fn waits(&self) -> bool {
        self.wait && self.dry_run.is_none()
    }
}

/// The exit code if waiting for some VMs ended so, and for others nothing had to be waited for, or it failed.
pub(super) fn combined(waited: Option<Exit>, succeeded: usize, failed: usize) -> Exit {
    match waited {
        None => exit(succeeded, failed),
        Some(Exit::TimeOut) => Exit::TimeOut,
        Some(Exit::Success) if failed > 0 => Exit::Partly,
        Some(Exit::Negative) if succeeded > 0 => Exit::Partly,
        Some(waited) => waited,
    }
}
