//! The resource `VmReport`: what the runner in one Pod reports of its VM.
//!
//! The manager creates one for each Pod that runs a guest, and names it by the Pod's UID. The account of the runners may patch nothing but
//! the status of reports. A JSON Patch can read what it may write (`test`, `copy`), so a report has no secret, and nobody who does not know
//! a Pod's UID finds its report. The bounds of the status are in its schema, because a guest may have taken over its runner.
//!
//! The manager folds the report into the status of the VM, where people and programs read it.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    PendingChange, RunnerStatus, VirtualMachineStatus,
    conditions::{
        self, BOOTED, CHANGES_APPLIED, CONSOLE_CONNECTED, DEVICES_READY, RUNNING, USER_LOGGED_IN, VMOP_AGENT_CONNECTED,
    },
    network::MOST_NETWORKS,
    pending::{Subject, subject_of_runner},
    schema,
    status::{CdIdentity, DiskIdentity},
};

/// The conditions that runners report.
pub const REPORTED_CONDITIONS: [&str; 7] =
    [RUNNING, BOOTED, VMOP_AGENT_CONNECTED, USER_LOGGED_IN, CONSOLE_CONNECTED, CHANGES_APPLIED, DEVICES_READY];

/// The longest text that a guest, a viewer or a configuration may cause, in characters.
pub const LONGEST_TEXT: u32 = 512;
/// The longest message of a condition, in characters.
const LONGEST_MESSAGE: u32 = 8192;
/// The most pending changes.
pub const MOST_PENDING: u32 = 32;
/// The most devices: disks, CD drives, network cards and the watchdog.
pub const MOST_DEVICES: u32 = DiskIdentity::MOST + CdIdentity::MOST + MOST_NETWORKS + 1;
/// The most users at the serial console.
pub const MOST_USERS: u32 = 64;

/// What a report has of the guest's operating system.
pub const OSINFO_FIELDS: [&str; 10] = [
    "id",
    "kernel-release",
    "kernel-version",
    "machine",
    "name",
    "pretty-name",
    "variant",
    "variant-id",
    "version",
    "version-id",
];

/// What the manager tells the runner in a Pod.
#[allow(clippy::duplicated_attributes, reason = "columns may have the same type")]
#[derive(CustomResource, JsonSchema, Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[kube(
    group = "vmoperator.jdrupes.org",
    version = "v1",
    kind = "VmReport",
    plural = "vmreports",
    singular = "vmreport",
    namespaced,
    status = "VmReportStatus",
    derive = "PartialEq",
    doc = "What the runner in one Pod reports of its VM. The manager makes it, names it by the Pod's UID, and puts it in the status of the VM.",
    printcolumn(name = "VM", type_ = "string", json_path = ".spec.vm", description = "The VM"),
    printcolumn(
        name = "Running",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Running\")].status",
        description = "Whether its guest runs"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct VmReportSpec {
    /// The name of the VM.
    #[schemars(length(max = 253))]
    pub vm: String,
    /// The runner ends the guest at once: a forced stop was requested, or somebody has shortened the Pod's grace period, and it is over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub end_guest: bool,
    /// The number of times that the runners of earlier Pods have set the display's password. The runner continues with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_password_serial: Option<i64>,
}

/// What the runner reports: its part of the VM's status.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = bound)]
pub struct VmReportStatus {
    /// What the runner knows of the guest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "reported_conditions")]
    pub conditions: Vec<Condition>,
    /// Changes of the runner's configuration that take effect at the next start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "pending_changes")]
    pub pending_changes: Vec<ReportedChange>,
    /// Everything else.
    #[serde(flatten)]
    pub runner: RunnerStatus,
}

/// A change of the runner's configuration that takes effect at the next start.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct ReportedChange {
    /// The path of the field, such as `config.yaml/vm.maximumCpus`.
    #[schemars(length(max = LONGEST_TEXT), regex(pattern = "^(config\\.yaml/|cloud-init)"))]
    pub path: String,
    /// What the change is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "subject")]
    pub subject: Option<Subject>,
    /// The value in the running VM, as JSON in a text: so its length has a bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = LONGEST_TEXT))]
    pub current: Option<String>,
    /// The value after the next start, as JSON in a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = LONGEST_TEXT))]
    pub wanted: Option<String>,
    /// Why the value does not change while the VM runs.
    #[schemars(length(max = LONGEST_TEXT))]
    pub reason: String,
}

impl From<PendingChange> for ReportedChange {
    fn from(PendingChange { path, subject, current, wanted, reason }: PendingChange) -> Self {
        let text = |value: Option<Value>| value.map(|value| value.to_string());
        Self { path, subject, current: text(current), wanted: text(wanted), reason }
    }
}

impl From<ReportedChange> for PendingChange {
    fn from(ReportedChange { path, subject, current, wanted, reason }: ReportedChange) -> Self {
        let value = |text: Option<String>| text.and_then(|text| serde_json::from_str(&text).ok());
        Self { path, subject, current: value(current), wanted: value(wanted), reason }
    }
}

impl VmReportStatus {
    /// Puts the report of the Pod with that UID in the status of the VM: the whole part of the runner is replaced. What must stay the same
    /// at each start stays known if the runner does not say it.
    ///
    /// A condition keeps its time while its status is the same as before, whichever Pod reports it. Only that of Running is always the
    /// runner's: the manager compares it with the end of containers. A time that can't be, before 1970 or after `now`, does not count.
    pub fn fold_into(self, pod_uid: &str, now: Timestamp, status: &mut VirtualMachineStatus) {
        let Self { mut conditions, pending_changes, runner } = self;
        conditions.retain(|condition| REPORTED_CONDITIONS.contains(&condition.type_.as_str()));
        status.reported = Some(conditions.iter().map(|condition| condition.type_.clone()).collect());
        for condition in &mut conditions {
            let before = conditions::find(&status.conditions, &condition.type_);
            let since = before.filter(|before| before.status == condition.status).map(|it| &it.last_transition_time);
            let can_be = (Timestamp::UNIX_EPOCH..=now).contains(&condition.last_transition_time.0);
            if condition.type_ != RUNNING || !can_be {
                // A new time at each call would be a write at each call.
                let or_else = if can_be { &condition.last_transition_time } else { &Time(now) };
                condition.last_transition_time = since.unwrap_or(or_else).clone();
            }
            // The manager knows the generation that the guest has.
            let before = before.filter(|_| [RUNNING, BOOTED].contains(&condition.type_.as_str()));
            condition.observed_generation = before.and_then(|before| before.observed_generation);
        }
        status.conditions.retain(|condition| !REPORTED_CONDITIONS.contains(&condition.type_.as_str()));
        status.conditions.extend(conditions);
        status.pending_changes.retain(PendingChange::is_of_manager);
        let of_runner = pending_changes.into_iter().map(PendingChange::from);
        status.pending_changes.extend(of_runner.filter(|change| !change.is_of_manager()));
        status.pod_uid = Some(pod_uid.to_owned());
        let before = status.runner.identity.take();
        let identity = match runner.identity {
            Some(identity) => Some(identity.after(before)),
            None => before,
        };
        status.runner = RunnerStatus { identity, ..runner };
    }
}

/// Bounds what a report says: a guest may have taken over its runner. The status of a VM has no such bounds, because runners of earlier
/// releases, and of the VM-Operator, write into it what they always wrote.
fn bound(schema: &mut Schema) {
    let long = || json!({ "maxLength": LONGEST_TEXT });
    let count = || json!({ "maximum": u32::MAX });
    let bounds = [
        ("runnerVersion", json!({ "maxLength": 64 })),
        ("accelerator", json!({ "maxLength": 64 })),
        ("cpus", json!({ "maximum": 65_536 })),
        ("ram", json!({ "maxLength": 32 })),
        ("consoleClient", long()),
        ("serialUsers", json!({ "maxItems": MOST_USERS, "items": text(LONGEST_TEXT) })),
        ("loggedInUser", long()),
        ("displayPasswordSerial", json!({ "minimum": 0 })),
        ("displayPasswordExpiry", long()),
        ("devices", json!({ "maxItems": MOST_DEVICES })),
        ("identity", identity()),
        ("resetCount", count()),
        ("rebootCount", count()),
        ("configDigest", json!({ "maxLength": 128 })),
        ("osinfo", osinfo()),
    ];
    let Some(Value::Object(properties)) = schema.get_mut("properties") else { return };
    for (field, bound) in bounds {
        if let (Some(Value::Object(property)), Value::Object(bound)) = (properties.get_mut(field), bound) {
            property.remove("x-kubernetes-preserve-unknown-fields");
            property.extend(bound);
        }
    }
    let of_device = properties.get_mut("devices").and_then(|devices| devices.pointer_mut("/items/properties"));
    if let Some(of_device) = of_device {
        for (field, longest) in [("name", LONGEST_TEXT), ("reason", 64), ("message", LONGEST_TEXT)] {
            of_device[field]["maxLength"] = longest.into();
        }
    }
}

/// A text of at most that many characters.
fn text(most: u32) -> Value {
    json!({ "type": "string", "maxLength": most })
}

/// The runner's conditions as a map by type.
fn reported_conditions(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = schema::conditions(generator).to_value();
    schema["maxItems"] = REPORTED_CONDITIONS.len().into();
    let properties = &mut schema["items"]["properties"];
    properties["type"]["enum"] = json!(REPORTED_CONDITIONS);
    properties["reason"]["pattern"] = "^[A-Za-z]{1,64}$".into();
    properties["message"]["maxLength"] = LONGEST_MESSAGE.into();
    Schema::try_from(schema).unwrap_or_default()
}

/// What each device of a kind keeps: a map by `key`.
fn kept(device: &str, most: u32, key: &str, required: &[&str], properties: Value) -> Value {
    json!({
        "type": "array", "maxItems": most, "description": format!("What each {device} keeps for the next start."),
        "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key],
        "items": { "type": "object", "required": required, "properties": properties },
    })
}

fn name(what: &str) -> Value {
    json!({ "type": "string", "pattern": "^[0-9a-z-]{1,63}$", "description": what })
}

fn slot(most: u32, gives: &str) -> Value {
    json!({ "type": "integer", "minimum": 0, "maximum": most - 1, "description": format!("The slot, which gives the {gives}.") })
}

/// An entry of a list that has at most so many.
fn entry(most: u32, what: &str) -> Value {
    json!({
        "type": "object", "required": ["position", "parameters"], "description": what,
        "properties": {
            "position": { "type": "integer", "minimum": 0, "maximum": most - 1, "description": "How many entries were before it." },
            "parameters": { "type": "string", "pattern": "^[0-9a-f]{1,64}$", "description": "A hash of what it was." },
        },
    })
}

fn identity() -> Value {
    let word = |most: &str, what: &str| json!({ "type": "string", "pattern": format!("^[0-9A-Za-z._-]{{1,{most}}}$"), "description": what });
    json!({
        "type": "object",
        "properties": {
            "uuid": { "type": "string", "pattern": "^[0-9A-Za-z-]{1,64}$", "description": "The VM's UUID." },
            "macs": {
                "type": "array", "maxItems": 64, "items": { "type": "string", "pattern": "^[0-9A-Fa-f:]{1,32}$" },
                "description": "The MAC addresses, in the order of the networks, as runners of earlier releases have them.",
            },
            "networks": kept("network", MOST_NETWORKS, "slot", &["mac", "slot", "entry"], json!({
                "name": name("Its name, if the spec gives it one."),
                "mac": { "type": "string", "pattern": "^[0-9A-Fa-f:]{1,32}$", "description": "The MAC address." },
                "slot": slot(MOST_NETWORKS, "PCI address"),
                "entry": entry(MOST_NETWORKS, "The entry in `spec.vm.networks` as it was."),
            })),
            "disks": kept("disk", DiskIdentity::MOST, "name", &["name", "slot"], json!({
                "name": name("The name of its volume in the Pod."),
                "slot": slot(DiskIdentity::MOST, "PCI address"),
            })),
            "cds": kept("CD drive", CdIdentity::MOST, "slot", &["slot", "entry"], json!({
                "name": name("Its name, if the spec gives it one."),
                "slot": slot(CdIdentity::MOST, "SATA port"),
                "entry": entry(CdIdentity::MOST, "The drive in the list of CD drives, and the CD in it, as they were."),
                "unused": { "type": "boolean", "description": "The spec does not have the drive any more." },
            })),
            "machineType": word("64", "QEMU's machine type with its version, such as `pc-q35-7.2`."),
            "hardware": word("64", "How the devices are arranged."),
        },
    })
}

/// What a change of a runner can be about.
fn subject(_: &mut SchemaGenerator) -> Schema {
    subject_of_runner(LONGEST_TEXT)
}

/// Pending changes as a map by path.
fn pending_changes(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = schema::map_of::<ReportedChange>(generator, &["path"]).to_value();
    schema["maxItems"] = MOST_PENDING.into();
    Schema::try_from(schema).unwrap_or_default()
}

/// The fields that QEMU's guest agent knows, and no others
/// (<https://www.qemu.org/docs/master/interop/qemu-ga-ref.html#object-QGA-qapi-schema-GuestOSInfo>).
fn osinfo() -> Value {
    let fields: Map<String, Value> =
        OSINFO_FIELDS.iter().map(|name| ((*name).to_owned(), text(LONGEST_TEXT))).collect();
    json!({ "type": "object", "properties": fields })
}

#[cfg(test)]
mod tests {
    use crate::test_support::status_schema;

    use super::*;

    /// Where a part of a report may be what the status of a VM may not.
    fn wider(report: &Value, vm: &Value, path: &str) -> Vec<String> {
        let mut found = Vec::new();
        for bound in ["pattern", "enum", "format", "type", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"] {
            let (Some(of_report), Some(of_vm)) = (report.get(bound), vm.get(bound)) else {
                found.extend(vm.get(bound).map(|_| format!("{path}: {bound}")));
                continue;
            };
            let is_part = match (of_report, of_vm) {
                (Value::Array(part), Value::Array(all)) if bound == "enum" => part.iter().all(|one| all.contains(one)),
                (one, other) => one == other,
            };
            found.extend((!is_part).then(|| format!("{path}: {bound}")));
        }
        for (bound, is_upper) in [
            ("maximum", true),
            ("maxLength", true),
            ("maxItems", true),
            ("minimum", false),
            ("minLength", false),
            ("minItems", false),
        ] {
            let Some(of_vm) = vm[bound].as_f64() else { continue };
            let is_within =
                report[bound].as_f64().is_some_and(|bound| if is_upper { bound <= of_vm } else { bound >= of_vm });
            found.extend((!is_within).then(|| format!("{path}: {bound}")));
        }
        let required = vm["required"].as_array().into_iter().flatten();
        let has = |name: &Value| report["required"].as_array().is_some_and(|names| names.contains(name));
        found.extend(required.filter(|name| !has(name)).map(|name| format!("{path}: required {name}")));
        for (name, of_report) in report["properties"].as_object().into_iter().flatten() {
            found.extend(wider(of_report, &vm["properties"][name], &format!("{path}.{name}")));
        }
        if report["items"].is_object() {
            found.extend(wider(&report["items"], &vm["items"], &format!("{path}[]")));
        }
        found
    }

    /// The manager writes into the status of the VM what a runner reports: what the API server took from the one it must take from the other.
    #[test]
    fn what_a_report_may_say_the_status_of_a_vm_may_say() {
        let (mut report, vm) = (status_schema("vmreports-crd.yaml"), status_schema("vms-crd.yaml"));
        // These have another form: the values are texts.
        report["properties"].as_object_mut().unwrap().remove("pendingChanges");
        assert_eq!(wider(&report, &vm, "status"), Vec::<String>::new());
    }
}
