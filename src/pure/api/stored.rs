//! Reads a VM as the API server has it: part by part.
//!
//! What is stored may have been written under another definition, or by another program. A value that can't be read takes away only
//! its own part:
//!
//! | part | if it can't be read |
//! |---|---|
//! | `metadata.name` | there is no VM |
//! | any other field of `metadata`, or of `status` | the field is left out; of a list or a map only the bad entries |
//! | a field of `spec` or of `spec.vm` | the VM keeps the other fields, and [`InvalidSpec`] names this one: nothing can be rendered, but the VM can be stopped |
//! | `spec.vm.state` | as above, and the VM keeps its power state |
//!
//! `metadata.managedFields` say who has set which field. A tool may have reset them; then a `spec.vm.state` that is there counts as set by
//! [`BEFORE_FIRST_APPLY`], and not as a default that nobody has set.
//!
//! A manifest in a file is read by `Deserialize` of [`VirtualMachine`], which accepts no bad value.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::{
    NamespaceResourceScope,
    apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry},
};
use kube::{Resource, core::ObjectMeta};
use serde::{Deserialize, Deserializer, de::DeserializeOwned, de::Error as _};
use serde_json::{Map, Value, json, value::RawValue};

use super::{VirtualMachine, VirtualMachineSpec};

/// How deep a value may nest. The parser stops at 128, and a VM is also read as a part of other documents.
pub const DEEPEST: usize = 100;
/// How many values a field may have. In memory each takes up to a hundred times of its text, and a VM is copied some times while it is rendered.
const MOST_VALUES: usize = 20_000;
/// The longest error about one field, in characters. An error quotes the value.
const LONGEST_ERROR: usize = 300;

/// The field manager to which the API server gives all fields of an object without entries at its first apply
/// (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#upgrading-from-client-side-apply-to-server-side-apply>).
pub const BEFORE_FIRST_APPLY: &str = "before-first-apply";

/// The fields of a stored spec that can't be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InvalidSpec {
    /// The fields, each with its error, for people.
    pub message: String,
    /// Nobody knows what `spec.vm.state` is, so the VM keeps its power state.
    pub is_state_unknown: bool,
}

/// A VM as the API server has it.
#[derive(Clone, Debug)]
pub struct StoredVm(pub VirtualMachine);

impl<'de> Deserialize<'de> for StoredVm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        read(text.get()).map(Self).map_err(D::Error::custom)
    }
}

impl Resource for StoredVm {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        VirtualMachine::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        VirtualMachine::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        VirtualMachine::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        VirtualMachine::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.meta()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.meta_mut()
    }
}

/// Reads a VM from JSON.
///
/// # Errors
/// If the text is not a JSON object, or the VM has no name.
pub fn read(text: &str) -> Result<VirtualMachine, serde_json::Error> {
    // What nests deeper can't be a part of another document.
    let Extent { depth, values } = extent(text);
    let is_extreme = depth > DEEPEST || values > MOST_VALUES;
    // Nearly every VM can be read as a whole, which is faster.
    let whole = if is_extreme { None } else { serde_json::from_str(text).ok() };
    let mut vm = whole.map_or_else(|| read_parts(text), Ok)?;
    note_unrecorded_state(&mut vm, text);
    Ok(vm)
}

/// Notes that somebody has set `spec.vm.state`, if it is there and nothing of the spec is recorded in the entries; or else that nobody has, because
/// the VM is written with its default from here on.
fn note_unrecorded_state(vm: &mut VirtualMachine, text: &str) {
    let entries = vm.metadata.managed_fields.get_or_insert_default();
    let of_spec =
        |entry: &ManagedFieldsEntry| entry.fields_v1.as_ref().is_some_and(|set| set.0.get("f:spec").is_some());
    if entries.iter().any(of_spec) {
        return;
    }
    let machine = spec_text(text).and_then(|spec| fields(spec.get())?.remove("vm"));
    let state = machine.and_then(|machine| fields(machine.get())?.remove("state"));
    let has_state = state.is_some_and(|state| !is_null(state));
    let set = if has_state { json!({ "f:vm": { "f:state": {} } }) } else { json!({}) };
    entries.push(ManagedFieldsEntry {
        manager: Some(BEFORE_FIRST_APPLY.into()),
        operation: Some("Update".into()),
        fields_v1: Some(FieldsV1(json!({ "f:spec": set }))),
        ..ManagedFieldsEntry::default()
    });
}

/// How much there is in a JSON text.
struct Extent {
    /// How deep it nests.
    depth: usize,
    /// How many values it has, at most.
    values: usize,
}

fn extent(text: &str) -> Extent {
    let (mut depth, mut deepest, mut in_text, mut is_escaped) = (0_usize, 0, false, false);
    let mut values = 1;
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_text,
            b'"' => in_text = !in_text,
            b'{' | b'[' if !in_text => (depth, values) = (depth + 1, values + 1),
            b',' if !in_text => values += 1,
            b'}' | b']' if !in_text => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    Extent { depth: deepest, values }
}

/// The text of a VM's spec.
pub fn spec_text(text: &str) -> Option<&RawValue> {
    fields(text)?.remove("spec")
}

/// Fields that are not parsed yet.
type Fields<'a> = BTreeMap<String, &'a RawValue>;

fn fields(text: &str) -> Option<Fields<'_>> {
    serde_json::from_str(text).ok()
}

fn read_parts(text: &str) -> Result<VirtualMachine, serde_json::Error> {
    let mut parts: Fields<'_> = serde_json::from_str(text)?;
    let mut part = |name: &str| parts.remove(name).map(RawValue::get);
    let metadata: ObjectMeta = part("metadata").and_then(fields).map(readable_fields).unwrap_or_default();
    if metadata.name.is_none() {
        return Err(serde_json::Error::custom("metadata.name: a VM has a name"));
    }
    let spec = readable_spec(part("spec"))?;
    let status = part("status").and_then(fields).map(readable_fields);
    Ok(VirtualMachine { metadata, spec, status })
}

/// Parses a value that neither nests too deep nor has too many values.
fn value(text: &RawValue) -> Result<Value, String> {
    if extent(text.get()).values > MOST_VALUES {
        return Err(format!("it has more than {MOST_VALUES} values"));
    }
    let value: Value = serde_json::from_str(text.get()).map_err(|error| error.to_string())?;
    if nests_deeper(&value, DEEPEST) { Err(format!("it nests deeper than {DEEPEST} levels")) } else { Ok(value) }
}

/// Whether a value nests deeper than so many levels.
pub fn nests_deeper(value: &Value, levels: usize) -> bool {
    let below = |item: &Value| levels == 0 || nests_deeper(item, levels - 1);
    match value {
        Value::Object(map) => map.values().any(below),
        Value::Array(list) => list.iter().any(below),
        _ => false,
    }
}

/// A struct of the fields that can be read.
fn readable_fields<T: DeserializeOwned + Default>(fields: Fields<'_>) -> T {
    let mut readable = Map::new();
    for (name, text) in fields {
        let value = value(text).ok().and_then(|value| readable_value::<T>(&name, value));
        readable.extend(value.map(|value| (name, value)));
    }
    serde_json::from_value(Value::Object(readable)).unwrap_or_default()
}

/// The part of a field's value that can be read.
fn readable_value<T: DeserializeOwned>(name: &str, value: Value) -> Option<Value> {
    let fits = |value: &Value| serde_json::from_value::<T>(json!({ name: value })).is_ok();
    if fits(&value) {
        return Some(value);
    }
    let readable = match value {
        Value::Array(items) => {
            Value::Array(items.into_iter().map(complete).filter(|item| fits(&json!([item]))).collect())
        }
        Value::Object(map) => {
            Value::Object(map.into_iter().filter(|(key, value)| fits(&json!({ key: value }))).collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => return None,
    };
    Some(readable).filter(fits)
}

/// A condition whose time is missing or wrong still says what is the case: it gets the oldest time. Other items of lists stay as they
/// are.
fn complete(mut item: Value) -> Value {
    let is_condition = item["type"].is_string() && item["status"].is_string();
    if let (true, Value::Object(condition)) = (is_condition, &mut item) {
        let is_time =
            |value: &Value| value.as_str().is_some_and(|time| time.parse::<k8s_openapi::jiff::Timestamp>().is_ok());
        condition.retain(|field, value| match field.as_str() {
            "lastTransitionTime" => is_time(value),
            "observedGeneration" => value.is_i64(),
            "reason" | "message" => value.is_string(),
            _ => true,
        });
        condition.entry("lastTransitionTime").or_insert_with(|| json!("1970-01-01T00:00:00Z"));
    }
    item
}

/// A spec of the fields that can be read. Each of them was tried, so there is no error.
fn readable_spec(text: Option<&str>) -> Result<VirtualMachineSpec, serde_json::Error> {
    let mut errors = Vec::new();
    let mut parts = text.and_then(fields).unwrap_or_else(|| {
        errors.push("spec: it must be an object".into());
        Fields::new()
    });
    let machine = parts.remove("vm").and_then(|machine| fields(machine.get()));
    if machine.is_none() && errors.is_empty() {
        errors.push("spec.vm: it must be an object".into());
    }
    let has_state = machine.as_ref().is_none_or(|machine| machine.get("state").is_some_and(|state| !is_null(state)));
    let in_spec = |name: &str, value: Value| json!({ name: value, "vm": {} });
    let in_machine = |name: &str, value: Value| json!({ "vm": { name: value } });
    let mut spec = readable_parts("spec", parts, in_spec, &mut errors);
    let machine = readable_parts("spec.vm", machine.unwrap_or_default(), in_machine, &mut errors);
    let is_state_unknown = has_state && !machine.contains_key("state");
    spec.insert("vm".into(), Value::Object(machine));
    let mut spec: VirtualMachineSpec = serde_json::from_value(Value::Object(spec))?;
    spec.invalid = (!errors.is_empty()).then(|| InvalidSpec { message: errors.join("; "), is_state_unknown });
    Ok(spec)
}

fn is_null(text: &RawValue) -> bool {
    text.get() == "null"
}

/// The parts that can be read. `whole` makes a spec that has only the part. A part that is null counts as absent.
fn readable_parts(
    path: &str,
    parts: Fields<'_>,
    whole: impl Fn(&str, Value) -> Value,
    errors: &mut Vec<String>,
) -> Map<String, Value> {
    let mut readable = Map::new();
    for (name, text) in parts.into_iter().filter(|(_, text)| !is_null(text)) {
        let read = value(text).map_err(|error| format!("{path}.{name}: {error}")).and_then(|value| {
            let spec: Result<VirtualMachineSpec, _> = serde_path_to_error::deserialize(whole(&name, value.clone()));
            spec.map(|_| value).map_err(|error| format!("spec.{error}"))
        });
        match read {
            Ok(value) => drop(readable.insert(name, value)),
            Err(error) => errors.push(shortened(&error)),
        }
    }
    readable
}

fn shortened(error: &str) -> String {
    match error.char_indices().nth(LONGEST_ERROR) {
        Some((end, _)) => format!("{}...", &error[..end]),
        None => error.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{
        PowerState,
        conditions::{self, BOOTED, RUNNING},
    };

    fn vm(edit: impl FnOnce(&mut Value)) -> VirtualMachine {
        let mut vm = json!({
            "metadata": { "name": "apple", "namespace": "orchard", "labels": { "a": "b" }, "annotations": { "c": "d" } },
            "spec": { "guestShutdownStops": true, "vm": {
                "state": "Running", "maximumCpus": 2, "disks": [{ "cdrom": { "image": "" } }, { "cdrom": { "image": "" } }],
            } },
            "status": { "power": "Running", "osinfo": { "id": "debian" } },
        });
        edit(&mut vm);
        read(&vm.to_string()).unwrap()
    }

    fn nested(levels: usize) -> Value {
        (0..levels).fold(json!("x"), |value, _| json!([value]))
    }

    #[test]
    fn a_state_of_which_nothing_is_recorded_counts_as_set() {
        let set = |entries: Value, machine: Value| {
            let metadata = json!({ "name": "apple", "managedFields": entries });
            let vm = read(&json!({ "metadata": metadata, "spec": { "vm": machine } }).to_string()).unwrap();
            let entries = json!(vm.metadata.managed_fields);
            assert_eq!(read(&json!(vm).to_string()).unwrap().metadata.managed_fields, vm.metadata.managed_fields);
            entries.to_string().contains("f:state")
        };
        let of = |fields: Value| json!([{ "manager": "x", "operation": "Apply", "fieldsV1": fields }]);
        assert!(set(json!([]), json!({ "state": "Stopped" })));
        assert!(set(of(json!({ "f:status": {} })), json!({ "state": "Stopped" })), "only the status was applied since");
        assert!(!set(of(json!({ "f:spec": {} })), json!({ "state": "Stopped" })), "it is a default that nobody set");
        assert!(!set(json!([]), json!({})) && !set(json!([]), json!({ "state": null })), "it has none");
    }

    #[test]
    fn a_bad_value_in_the_spec_is_named_and_the_rest_stays() {
        for (pointer, value, error) in [
            ("/spec/vm/maximumRam", json!("16Ei"), "spec.vm.maximumRam: \"16Ei\" is not a size"),
            ("/spec/vm/maximumRam", json!(-1), "spec.vm.maximumRam: \"-1\" is not a size"),
            ("/spec/vm/maximumCpus", json!("2"), "spec.vm.maximumCpus: invalid type: string \"2\", expected u32"),
            ("/spec/vm/disks/1/bootindex", json!(1_u64 << 32), "spec.vm.disks[1].bootindex: invalid value"),
            ("/spec/vm/display", json!("on"), "spec.vm.display: invalid type: string \"on\""),
            ("/spec/loadBalancerService", json!("yes"), "spec.loadBalancerService: invalid type"),
            ("/spec/templateValues", nested(130), "spec.templateValues: recursion limit exceeded"),
            ("/spec/templateValues", nested(126), "spec.templateValues: it nests deeper than 100 levels"),
            ("/spec/templateValues", nested(102), "spec.templateValues: it nests deeper than 100 levels"),
            (
                "/spec/templateValues",
                json!({ "a": vec![0; 20_000] }),
                "spec.templateValues: it has more than 20000 values",
            ),
        ] {
            let vm = vm(|vm| {
                let (parent, field) = pointer.rsplit_once('/').unwrap();
                vm.pointer_mut(parent).unwrap()[field] = value;
            });
            let invalid = vm.spec.invalid.clone().unwrap_or_else(|| panic!("{pointer}"));
            assert!(invalid.message.starts_with(error), "{}", invalid.message);
            assert!(invalid.message.len() < 500 && !invalid.is_state_unknown);
            assert!(vm.spec.guest_shutdown_stops);
            assert_eq!((vm.spec.vm.state, vm.status.unwrap().power), (PowerState::Running, Some(PowerState::Running)));
            assert_eq!(json!(vm.metadata.labels), json!({ "a": "b" }));
        }
    }

    #[test]
    fn what_nests_as_deep_as_it_may_is_read() {
        for levels in [1, 90, 97, 100] {
            let values = json!({ "a": nested(levels - 1) });
            let vm = vm(|vm| vm["spec"]["templateValues"] = values.clone());
            assert_eq!((vm.spec.invalid, vm.spec.template_values), (None, Some(values)), "{levels}");
        }
    }

    #[test]
    fn the_extent_of_a_text_is_that_of_its_brackets_and_commas_outside_of_strings() {
        assert_eq!(extent(r#"{"a":[1,2,{}],"b":",[,"}"#).values, 7);
        for (text, expected) in
            [("7", 0), ("{}", 1), (r#"{"a":[1,{"b":[]}],"c":{}}"#, 4), (r#"["[[[", "\"[[", "\\", ["\\\"["]]"#, 2)]
        {
            assert_eq!(extent(text).depth, expected, "{text}");
        }
    }

    #[test]
    fn each_bad_field_is_named() {
        let vm = vm(|vm| {
            vm["spec"]["pools"] = json!("one");
            vm["spec"]["vm"]["useTpm"] = json!("yes");
        });
        let message = vm.spec.invalid.unwrap().message;
        assert!(message.contains("spec.pools: ") && message.contains("; spec.vm.useTpm: "), "{message}");
    }

    #[test]
    fn a_state_that_can_not_be_read_is_unknown() {
        let state = |vm: &VirtualMachine| vm.spec.invalid.as_ref().map(|invalid| invalid.is_state_unknown);
        for bad in [json!(7), json!("Sideways"), json!([])] {
            assert_eq!(state(&vm(|vm| vm["spec"]["vm"]["state"] = bad.clone())), Some(true), "{bad}");
        }
        for bad in [json!(null), json!(7), json!({ "vm": null }), json!({ "vm": "x" })] {
            assert_eq!(state(&vm(|vm| vm["spec"] = bad.clone())), Some(true), "{bad}");
        }
        // Nobody has set a state that is null.
        assert_eq!(state(&vm(|vm| vm["spec"]["vm"]["state"] = json!(null))), None);
    }

    #[test]
    fn of_the_status_what_can_be_read_is_kept() {
        let conditions = json!([
            { "type": "Running", "status": "True", "reason": "VmRunning" },
            { "type": "Booted", "status": "True", "reason": 7, "lastTransitionTime": "yesterday" },
            { "type": "UserLoggedIn", "status": 7 }, "x", null,
        ]);
        let vm = vm(|vm| {
            vm["status"] = json!({
                "power": "Running", "cpus": "two", "ram": 4, "assignment": { "user": "me", "lastUsed": "?" },
                "conditions": conditions, "osinfo": nested(126), "pendingChanges": { "a": 1 }, "halted": {}, "phase": null,
                "identity": { "uuid": "u", "macs": ["02:00:00:00:00:01", 7] }, "addresses": [{ "type": "PodIP" }],
            });
        });
        assert_eq!(vm.spec.invalid, None);
        let status = vm.status.unwrap();
        assert_eq!((status.power, status.runner.cpus, &status.runner.osinfo), (Some(PowerState::Running), None, &None));
        assert_eq!(json!(status.pools.assignment), json!({ "user": "me" }));
        assert_eq!(json!(status.runner.identity), json!({ "uuid": "u" }));
        assert!(conditions::is_true(&status.conditions, RUNNING) && conditions::is_true(&status.conditions, BOOTED));
        assert_eq!(status.conditions.len(), 2);
    }

    #[test]
    fn of_the_metadata_what_can_be_read_is_kept() {
        let vm = vm(|vm| {
            vm["metadata"]["labels"]["n"] = json!(null);
            vm["metadata"]["annotations"] = json!(7);
            vm["metadata"]["generation"] = json!("many");
        });
        assert_eq!((vm.spec.invalid, vm.metadata.annotations, vm.metadata.generation), (None, None, None));
        assert_eq!(json!(vm.metadata.labels), json!({ "a": "b" }));
        assert!(read(r#"{"metadata":{"name":7}}"#).is_err() && read("[]").is_err());
    }
}
