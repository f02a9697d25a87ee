//! Declarations generated from a definition: the properties of a resource, values that its schema allows, and how one is set.

use std::sync::LazyLock;

use proptest::{
    strategy::{Strategy, ValueTree},
    string::string_regex,
    test_runner::TestRunner,
};
use serde_json::{Map, Value, json};
use vm_operator::api::crd::crds;

/// A step on the way to a property: a field, or a new last item of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Field(String),
    Item,
}

/// A property with its schema.
pub struct Property {
    pub way: Vec<Step>,
    pub schema: Value,
}

impl Property {
    /// As the documentation writes it: `vm.disks[].cdrom.image`.
    pub fn name(&self) -> String {
        let mut name = String::new();
        for step in &self.way {
            match step {
                Step::Field(field) if name.is_empty() => name.push_str(field),
                Step::Field(field) => name.push_str(&format!(".{field}")),
                Step::Item => name.push_str("[]"),
            }
        }
        name
    }
}

/// The schema of the spec of the resource with this plural.
pub fn spec_of(plural: &str) -> Value {
    let (_, crd) = crds().into_iter().find(|(_, crd)| crd["spec"]["names"]["plural"] == plural).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

/// What is wrong if a property has an effect or none. `without`: the properties that have none, and why.
pub fn wrong_effect(name: &str, has_effect: bool, without: &[(&str, &str)]) -> Option<String> {
    match (has_effect, without.iter().any(|(without, _)| *without == name)) {
        (false, false) => Some(format!("{name}: no value of it has an effect")),
        (true, true) => Some(format!("{name}: it has an effect, and WITHOUT_EFFECT says that it has none")),
        (true, false) | (false, true) => None,
    }
}

/// All properties below a schema that have none below them.
pub fn properties(schema: &Value) -> Vec<Property> {
    let mut found = Vec::new();
    collect(&[], schema, &mut found);
    found
}

fn collect(way: &[Step], schema: &Value, found: &mut Vec<Property>) {
    if let Some(fields) = schema["properties"].as_object() {
        for (name, field) in fields {
            collect(&[way, &[Step::Field(name.clone())]].concat(), field, found);
        }
    } else if schema["items"]["properties"].is_object() {
        collect(&[way, &[Step::Item]].concat(), &schema["items"], found);
    } else {
        found.push(Property { way: way.to_vec(), schema: schema.clone() });
    }
}

/// Values that a schema allows: extremes, each of an enumeration, and of texts some that fit the pattern.
pub fn samples(schema: &Value) -> Vec<Value> {
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().filter(|value| !value.is_null()).cloned().collect();
    }
    if schema["x-kubernetes-int-or-string"] == true {
        return vec![json!("3Gi"), json!(4_294_967_296_i64)];
    }
    match schema["type"].as_str() {
        Some("boolean") => vec![json!(true), json!(false)],
        Some("integer") => {
            let least = schema["minimum"].as_f64().unwrap_or(0.0) as i64;
            let most = schema["maximum"].as_f64().map_or(i64::from(i32::MAX), |most| most as i64);
            let mut values = vec![least, (least + 1).min(most), most];
            values.dedup();
            values.into_iter().map(Value::from).collect()
        }
        Some("number") => vec![json!(1), json!(2.5)],
        Some("string") => texts(schema).into_iter().map(Value::from).collect(),
        Some("array") => samples(&schema["items"]).into_iter().map(|item| json!([item])).collect(),
        Some("object") if schema["additionalProperties"].is_object() => {
            samples(&schema["additionalProperties"]).into_iter().map(|value| json!({ "key": value })).collect()
        }
        // An amount of a resource, which may be a text or a number.
        None if schema["pattern"].is_string() => vec![json!("3"), json!("500m"), json!(2)],
        _ => vec![json!({ "key": "value" })],
    }
}

fn texts(schema: &Value) -> Vec<String> {
    if schema["format"] == "date-time" {
        return vec!["2027-01-15T07:30:00Z".to_owned(), "2027-01-15T07:31:00Z".to_owned()];
    }
    let Some(pattern) = schema["pattern"].as_str() else { return vec!["one".to_owned(), "another".to_owned()] };
    let inner = pattern.trim_start_matches('^').trim_end_matches('$');
    let mut runner = TestRunner::deterministic();
    match string_regex(inner) {
        Ok(strategy) => (0..2).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect(),
        Err(_) => vec!["one".to_owned()],
    }
}

/// Sets a value, and on the way to it what the schema requires beside it. `adds`: in a new item of a list, not in the last one.
pub fn set(into: &mut Value, schema: &Value, way: &[Step], value: &Value, adds: bool) {
    let Some((step, rest)) = way.split_first() else {
        *into = value.clone();
        return;
    };
    match step {
        Step::Field(name) => {
            if !into.is_object() {
                *into = Value::Object(required(schema));
            }
            set(&mut into[name.as_str()], &schema["properties"][name.as_str()], rest, value, adds);
        }
        Step::Item => {
            if !into.is_array() {
                *into = json!([]);
            }
            let items = into.as_array_mut().unwrap();
            if adds || items.is_empty() {
                items.push(Value::Object(required(&schema["items"])));
            }
            set(items.last_mut().unwrap(), &schema["items"], rest, value, adds);
        }
    }
}

fn required(schema: &Value) -> Map<String, Value> {
    let names = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    names.map(|name| (name.to_owned(), first(&schema["properties"][name]))).collect()
}

fn first(schema: &Value) -> Value {
    match schema["properties"].is_object() {
        true => Value::Object(required(schema)),
        false => samples(schema).into_iter().next().unwrap_or(Value::Null),
    }
}

/// The schema of the spec of VMs.
pub static VM_SPEC: LazyLock<Value> = LazyLock::new(|| spec_of("vms"));
