//! A change that waits for the VM's next start: an item of `status.pendingChanges`.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::schema;

/// A change that takes effect at the next start.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
pub struct PendingChange {
    /// The path of the field, for people, such as `objects/Pod/spec.containers[vm-runner].image`, or `config.yaml/vm.maximumCpus`.
    pub path: String,
    /// What the change is about. Absent: a runner of an earlier release reports the change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "any_subject")]
    pub subject: Option<Subject>,
    /// The value in the running VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any")]
    pub current: Option<Value>,
    /// The value after the next start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any")]
    pub wanted: Option<Value>,
    /// Why the value does not change while the VM runs.
    pub reason: String,
}

impl PendingChange {
    /// Whether the manager reports the change. All others are the runner's.
    pub fn is_of_manager(&self) -> bool {
        self.subject.as_ref().is_some_and(Subject::is_of_manager)
    }
}

/// Adds changes to a list so that no path is in it twice, because `status.pendingChanges` is a map by path. Changes of two objects or devices
/// with one name, or of two items that a template renders with the same key, get numbers.
pub fn add(list: &mut Vec<PendingChange>, changes: impl IntoIterator<Item = PendingChange>) {
    for change in changes {
        let is_free = |path: &String| list.iter().all(|other| other.path != *path);
        let numbered = (2..).map(|number| format!("{}#{number}", change.path));
        let path = std::iter::once(change.path.clone()).chain(numbered).find(is_free).unwrap_or_default();
        list.push(PendingChange { path, ..change });
    }
}

/// What a change is about.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(tag = "kind", content = "name")]
pub enum Subject {
    /// An object of the VM, with its kind and name.
    Object(String),
    /// A volume of the VM's Pod, or where a container of the Pod has it.
    Volume(String),
    /// The number of CPUs of the running guest.
    Cpus,
    /// The highest number of CPUs.
    MaximumCpus,
    /// The highest amount of memory.
    MaximumRam,
    /// A disk, with the name of its volume in the Pod.
    Disk(String),
    /// A CD drive, with its name, or its number among the CD drives, counted from 0.
    CdDrive(String),
    /// A network card, with its name, or its number among the network cards, counted from 0.
    Network(String),
    /// Another field of the runner's configuration.
    Setting(String),
    /// The QEMU template.
    QemuTemplate,
    /// The cloud-init data.
    CloudInit,
}

impl Subject {
    /// The kinds of subjects of the manager.
    const OF_MANAGER: [&str; 2] = ["Object", "Volume"];
    /// The kinds of subjects of the runner.
    const OF_RUNNER: [&str; 9] =
        ["Cpus", "MaximumCpus", "MaximumRam", "Disk", "CdDrive", "Network", "Setting", "QemuTemplate", "CloudInit"];

    /// Whether the manager reports such a change: it is one of what the templates render. All others are of the runner's configuration.
    pub fn is_of_manager(&self) -> bool {
        match self {
            Self::Object(_) | Self::Volume(_) => true,
            Self::Cpus
            | Self::MaximumCpus
            | Self::MaximumRam
            | Self::Disk(_)
            | Self::CdDrive(_)
            | Self::Network(_)
            | Self::Setting(_)
            | Self::QemuTemplate
            | Self::CloudInit => false,
        }
    }
}

fn any_subject(_: &mut SchemaGenerator) -> Schema {
    subject(&[&Subject::OF_MANAGER[..], &Subject::OF_RUNNER[..]].concat(), None)
}

/// The subjects that a runner may report, with names of at most that many characters.
pub(super) fn subject_of_runner(longest: u32) -> Schema {
    subject(&Subject::OF_RUNNER, Some(longest))
}

fn subject(kinds: &[&str], longest: Option<u32>) -> Schema {
    let mut name = json!({ "type": "string", "description": "The name of the device, volume, object or field." });
    if let Some(longest) = longest {
        name["maxLength"] = longest.into();
    }
    json_schema!({
        "type": "object",
        "description": "What the change is about. Absent: a runner of an earlier release reports the change.",
        "required": ["kind"],
        "properties": {
            "kind": { "type": "string", "enum": kinds, "description": "The kind of device, or what else changes." },
            "name": name,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The schemas list the kinds by their names.
    #[test]
    fn each_kind_of_subject_is_in_one_list() {
        let named =
            [Subject::Object, Subject::Volume, Subject::Disk, Subject::CdDrive, Subject::Network, Subject::Setting];
        let named = named.into_iter().map(|of| of("n".into()));
        let others =
            [Subject::Cpus, Subject::MaximumCpus, Subject::MaximumRam, Subject::QemuTemplate, Subject::CloudInit];
        let all: Vec<Subject> = named.chain(others).collect();
        assert_eq!(all.len(), Subject::OF_MANAGER.len() + Subject::OF_RUNNER.len());
        for subject in all {
            let value = json!(subject);
            let kinds = if subject.is_of_manager() { &Subject::OF_MANAGER[..] } else { &Subject::OF_RUNNER[..] };
            assert!(kinds.contains(&value["kind"].as_str().unwrap()), "{value}");
            assert_eq!(serde_json::from_value::<Subject>(value).unwrap(), subject);
        }
    }
}
