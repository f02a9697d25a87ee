//! Data for cloud-init: as a section of the runner's configuration, which runners of the original operator read, and as the texts of
//! the files that our runner reads.

use kube::ResourceExt;
use serde::{Serialize, ser::Error as _};
use serde_json::{Value, json};

use super::output::digest;
use crate::{
    api::{CloudInit, VirtualMachine},
    runner_config::CloudInitSection,
    user_data,
};

/// The section `cloudInit` of the runner's configuration. `None`: the VM has no data for cloud-init.
///
/// # Errors
/// If a value can't be written as JSON.
pub fn section(vm: &VirtualMachine) -> Result<Option<CloudInitSection>, serde_json::Error> {
    let Some(data) = &vm.spec.cloud_init else { return Ok(None) };
    let mut meta_data = data.meta_data.clone();
    if !meta_data.contains_key("instance-id") {
        // cloud-init runs again when the ID changes: that is, when its data changes. The ID does not contain the UID, because a VM that is
        // made again with its disks is the same guest.
        let content = serde_json::to_string(&json!([vm.namespace(), vm.name_any(), data]))?;
        meta_data.insert("instance-id".into(), json!(format!("i-{}", digest(&content))));
    }
    meta_data.entry("local-hostname".into()).or_insert_with(|| json!(vm.name_any()));
    Ok(Some(CloudInitSection {
        meta_data,
        user_data: data.user_data.clone().unwrap_or_else(|| json!({})),
        vendor_data: data.vendor_data.clone().unwrap_or_default(),
        network_config: data.network_config.clone(),
    }))
}

/// The files as templates see them. A text that is `None` has no file, or comes from the Secret or ConfigMap of `…_from`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CloudInitFiles {
    meta_data: String,
    user_data: Option<String>,
    vendor_data: Option<String>,
    network_config: Option<String>,
    user_data_from: Value,
    network_config_from: Value,
    /// The configuration of a legacy runner, with all of this data.
    pub(super) runner_config: Option<Value>,
}

impl CloudInitFiles {
    pub(super) fn of(data: &CloudInit, section: &CloudInitSection) -> Result<Self, serde_json::Error> {
        Ok(Self {
            meta_data: yaml(&json!(section.meta_data))?,
            user_data: match (&data.user_data, &data.user_data_from) {
                (Some(value), _) => Some(user_data(value)?),
                (None, Some(_)) => None,
                // cloud-init uses the disk only if this file exists.
                (None, None) => Some("#cloud-config\n{}\n".into()),
            },
            vendor_data: data.vendor_data.as_ref().map(user_data).transpose()?,
            network_config: data.network_config.as_ref().map(network_config).transpose()?,
            user_data_from: serde_json::to_value(&data.user_data_from)?,
            network_config_from: serde_json::to_value(&data.network_config_from)?,
            runner_config: None,
        })
    }
}

fn yaml(value: &Value) -> Result<String, serde_json::Error> {
    serde_saphyr::to_string(value).map_err(serde_json::Error::custom)
}

/// The text of `user-data` or of `vendor-data`, which cloud-init knows by its beginning.
///
/// # Errors
/// If a value can't be written as YAML.
pub fn user_data(value: &Value) -> Result<String, serde_json::Error> {
    user_data::text(value, yaml)
}

/// The text of `network-config`.
///
/// # Errors
/// If a value can't be written as YAML.
pub fn network_config(value: &Value) -> Result<String, serde_json::Error> {
    match value {
        Value::String(text) => Ok(text.clone()),
        value => yaml(value),
    }
}
